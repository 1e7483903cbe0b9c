// What torch asks of a CUDA device when tensors on it hold no numbers: that there is one, and a stream that does nothing.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace at {
struct CUDAHooks : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
};
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, CUDAHooks)
}  // namespace at

namespace {
using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::Stream;
struct Guard : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, getDevice()); }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};
c10::impl::DeviceGuardImplRegistrar registrar(DeviceType::CUDA, new Guard());
}  // namespace
