"""Optimizers, parameter groups and schedules."""

from overnight.optim.lamb import Lamb
from overnight.optim.lans import Lans
from overnight.optim.lars import Lars
from overnight.optim.muon import Muon

__all__ = ["Lamb", "Lans", "Lars", "Muon"]
