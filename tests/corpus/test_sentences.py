"""Sentence splitting: what ends a sentence in several languages and scripts, and what only looks like it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.corpus.clean import clean
from overnight.corpus.sentences import ends_like_a_sentence, sentences

# Each sentence of a paragraph with its end, `|` between sentences.
PARAGRAPHS = [
    # English
    "Mr. Smith met Dr. J. K. Jones at 3.14 p.m. on Jan. 5.|He left.",
    '"Go!" she said.|"No."|He went.',
    "The U.S. Army came.|See Fig. 3 and No. 5.|He said no.|It was I.|He knew.",
    "1. Introduction to it.|Then more.",
    "It was in 1999.|The year after he was 45.|Then came more.",
    "He lived in Rome (c. 1500).|Roe v. Wade was later.|See p. 5.",
    "There are terms a and b.|The term c.|The last one is x.|Then y.",
    "It was 5 m.|The other 7 g.|Both fit.",
    "There were 12.|May I ask why?|Yes.",
    "it was awful.|i liked the music.|they (e.g. the band) play approx. five songs, i.e. three.",
    "At four per cent. upon the stock.|The price was in Cat. no. seven of lib. xxxiii. cap. one.|See os.path. join it.",
    "It was made in the U.S.|The film is rated R.|It came at 4 p.m.|They went to J. Edgar Hoover and P. A. Sorokin.",
    "Some artists (e.g. The Who) sang.|P.S. The end is by X. He, of course.|A. The first item.",
    "I live in the U.S.|How are you?|It was 6 P.M.|Mr. Smith slept.",
    "It was weakened . . . was that of words.|The practice was less complex. . . .|Next sentence.|Use .NET and it runs.|.NET does.",
    # German
    "Das ist z. B. Bier.|Es gibt u. a. Wein.|Das heißt d. h. Most.",
    "Am 3. Mai 1999 kam er.|Der 2. Weltkrieg endete 1945.|Danach war Frieden.",
    "Im 20. Jahrhundert war das so.|Er wurde am 21. Oktober geboren.|Dann ging er.",
    "Siehe Abb. 3 und Nr. 5.|Sie zahlten ca. 5 Mio. Euro.|Das war viel.",
    "Er kam bzw. Anna kam.|Frl. Meier lebte 44 v. Chr. nicht.|Er hatte 12.|Dann ging er.",
    "„Kommst du?“|Er nickte.|»Ja.«|Sie ging.|»Nein.«|Er kam.",
    # Russian
    "Он жил в г. Москва.|Это было в 1945 г.|Потом он уехал.",
    "Ул. Ленина длинная.|См. рис. 5 ниже.|Это я.|Он ушёл.",
    "А. С. Пушкин писал стихи.|Это было давно.|Проф. Иванов знал.",
    "Население 5 тыс. Человек там мало.|Как дела?|Да!",
    # French
    "M. Dupont et Mme. Curie sont là.|Voir p. ex. Paris.|Il y en a.|Mlle. Anne dort.",
    "Il y a.|Elle va.|Où est-il ?|Ici.",
    "Il a dit « Oui. »|Puis il est parti.|« Non ! »|« “Si.” »|Elle dit « Non. », puis « Si. ».|Il part.|« Vient-il ? » dit-elle.|« Il viendra. » dit-il.",
    # Spanish
    "El Sr. López y la Sra. Díaz viven en EE. UU.|¿Cómo está Ud. hoy?|¡Bien!",
    "Véase la pág. 5.|La Dra. Ruiz lo dijo.|Es así.",
    # Greek, whose question mark is the semicolon
    "Πού πας;|Έρχομαι.|«Γιατί;»|— Ποιος είναι;|— Εγώ, και ποιος; εγώ.",
    "In it α; β and γ; The rest; Then x.",
    # Other scripts
    "كيف حالك؟|أنا بخير.|شكرا.",
    "یہ ایک جملہ ہے۔|یہ دوسرا ہے۔|کیا یہ؟|ہاں۔",
    "यह एक वाक्य है।|यह दूसरा है॥|क्या?|हाँ।",
    "Սա նախադասություն է։|Սա երկրորդն է։",
    "ይህ ዓረፍተ ነገር ነው።|ይህ ሁለተኛው ነው፧|አዎ።",
    "ဤသည်မှာ ဝါကျ။|ဒုတိယ။",
    "นี่คือ.|ประโยค.",
    "გამარჯობა.|როგორ ხარ?|„კარგად!“|თქვა მან.",  # Georgian, whose letters Unicode calls small
    "د. أحمد جاء.|المسافة 5 م.|ثم ذهب.",
    "डॉ. राम ने कहा।|प्रो. शर्मा गया।",
    "𑀅𑀓𑁇|𑀓𑁈",  # Brahmi, beyond 16 bits
    "Really⁈|Yes‼|No⁇|So‽|End.",
]
# Without a space between sentences.
WIDE = [
    "日本語。|これは文です。|次",
    "你好！|你是谁？|我是。",
    "「行け。」|彼は言った。",
    "全角．|半角｡|次",
    "他说：“你好。”|我走了。|“他问：‘为什么？’”|没人回答。",
    "３．５倍です。|第3．5節．|次",
    "「もう行く。」と彼は言った。|「え？」って聞いた。|『行け！』という。|「行け。」|ところが彼は来た。|（本当だ。）と思った。",
    "【注意！】|他看了《Who?》和《红楼梦》……然后走了。|好。",
]


@pytest.mark.parametrize("text", PARAGRAPHS)
def test_sentences_end_where_a_reader_of_the_language_ends_them(text: str) -> None:
    assert sentences(text.replace("|", " ")) == text.split("|")


@pytest.mark.parametrize("text", WIDE)
def test_wide_terminals_need_no_space(text: str) -> None:
    assert sentences(text.replace("|", "")) == text.split("|")


@given(st.text(alphabet='aB.!?…"”) 。؟۔।1г»;Πσ」と．\n'))
def test_sentences_lose_and_add_nothing(raw: str) -> None:
    cleaned = clean(raw)
    assert "".join(sentences(cleaned)).replace(" ", "") == cleaned.replace(" ", "").replace("\n", "")
    assert all(sentence and "\n" not in sentence for sentence in sentences(cleaned))


@pytest.mark.parametrize(
    "marks", [".", "?!", ".)", "。", "。.", "。\u201d", "。》", "…\u201c", "\U00011047", ". ", " »", ". »", "α;", "α;»", "．１", "。」と"]
)
def test_a_run_of_marks_is_split_in_linear_time(marks: str) -> None:
    """Each text is 500 kB: the square of its marks would be an hour."""
    text = "Contents" + marks * (500_000 // len(marks)) + "x"
    assert "".join(sentences(text)).replace(" ", "") == text.replace(" ", "")


@pytest.mark.parametrize(
    ("line", "ends"), [("Πού πας;", True), ("«Πού πας;»", True), ("Πού πας\u037e", True), ("one;", False), (";", False), ("", False)]
)
def test_a_greek_question_ends_like_a_sentence(line: str, ends: bool) -> None:
    assert ends_like_a_sentence(line) is ends
