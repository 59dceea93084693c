"""One answer, brought into a plain form: LaTeX spelling, exact numbers, units, number bases, words."""

import re
from dataclasses import dataclass
from fractions import Fraction

_UNICODE = {
    "\u2212": "-", "\u2013": "-", "\u2014": "-", "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u22c5": r"\cdot ",
    "\u00f7": "/", "\u2044": "/", "\u03c0": r"\pi ", "\u221e": r"\infty ", "\u2264": r"\le ", "\u2265": r"\ge ",
    "\u2260": r"\ne ", "\u00b0": r"^\circ ", "\u00b2": "^2", "\u00b3": "^3", "\u00bd": r"\frac{1}{2}",
    "\u00bc": r"\frac{1}{4}", "\u00be": r"\frac{3}{4}", "\u222a": r"\cup ", "\u2229": r"\cap ", "\u2208": r"\in ",
    "\u2248": r"\approx ", "\u00a0": " ", "\u202f": " ", "\u2009": " ", "\u2205": r"\emptyset ",
    "\u211d": r"\mathbb{R}",     "\u03b8": r"\theta ", "\u03b1": r"\alpha ", "\u03b2": r"\beta ",
}  # fmt: skip
_UNICODE_TABLE = str.maketrans(_UNICODE)
_SQUARE_ROOT = re.compile("\u221a\\s*(?:\\(([^()]*)\\)|(\\w+))")

_SPELLING = [
    (re.compile(r"\\(?:left|right|[bB]ig{1,2}[lr]?)(?![a-zA-Z])\.?"), ""),
    (re.compile(r"\\(?:displaystyle|limits|textstyle)(?![a-zA-Z])"), ""),
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\[dt]binom(?![a-zA-Z])"), r"\\binom"),
    (re.compile(r"\\(?:math(?:rm|bf|it|sf)|text(?:bf|it|rm|sf|tt)|operatorname|mbox)\s*\{"), r"\\text{"),
    (re.compile(r"\{\\(?:rm|bf|it)\s+([^{}]*)\}"), r"\\text{\1}"),
    (re.compile(r"\\text\s*\{\s*([a-zA-Z]|[-+]?[\d.,]*\d[^{}]*)\s*\}"), r"\1"),
    (re.compile(r"(?<=\d)(?:\{,\}|\\!?,\\!|,\\!|\\,|\\!)(?=\d{3}(?!\d))"), ","),
    (re.compile(r"\\!"), ""),
    (re.compile(r"(?<!\\)\\[,;: ]|~|\\quad(?![a-zA-Z])|\\qquad(?![a-zA-Z])"), " "),
    (re.compile(r"\\(?:leq|leqslant)(?![a-zA-Z])"), r"\\le"),
    (re.compile(r"\\(?:geq|geqslant)(?![a-zA-Z])"), r"\\ge"),
    (re.compile(r"\\neq(?![a-zA-Z])"), r"\\ne"),
    (re.compile(r"\\varnothing(?![a-zA-Z])"), r"\\emptyset"),
    (re.compile(r"\\pounds(?![a-zA-Z])"), "\u00a3"),
    (re.compile(r"\\(?:euro|EUR)(?![a-zA-Z])"), "\u20ac"),
    (re.compile(r"\^\s*\{\s*\\circ\s*\}|\\degree(?![a-zA-Z])|\^\s*\\circ(?![a-zA-Z])"), r"^\\circ"),
]  # fmt: skip
_NUMBER_AMONG_WORDS = re.compile(
    r"(?:[^\W\d_]{2,}[\s,.:']+)*(?P<number>\\?[$\u00a3\u20ac\u00a5]?-?[\d.,]*\d\s?\\?%?)(?:[\s,.:']+[^\W\d_]{2,})*[\s.,]*"
)
_TEXT_CONTENT = re.compile(r"\\text\s*\{([^{}]*)\}")
_LATEX_SIGNS = frozenset("\\{~")
_WRAPPERS = [("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`")]

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)"
_SIGNED = r"[-+]?\s*" + _DECIMAL
_FRACTION = rf"\\frac\s*(?:\{{\s*({_SIGNED})\s*\}}|(\d))\s*(?:\{{\s*({_SIGNED})\s*\}}|(\d))"
_MONEY_SIGNS = "\u00a2\u00a3\u20ac\u00a5"
_POWER = r"(?:\s*\^\s*\{?-?\d\}?)?"
_TEXT = r"\\text\s*\{[^{}]*\}"
_OVER = rf"\{{(?:{_TEXT}|[a-z]{{1,3}})\}}"
_WORDS = rf"(?:[{_MONEY_SIGNS}]|[a-zA-Z][a-zA-Z./ ]*)"
_UNIT = rf"(?:{_TEXT}|\\frac\s*{_OVER}\s*{_OVER}|{_WORDS}){_POWER}(?:\s*/\s*(?:{_TEXT}|[a-zA-Z]+){_POWER})?"
_NUMBER = re.compile(
    r"(?P<sign>[-+])?\s*(?P<currency>\\?[$\u00a3\u20ac\u00a5])?\s*(?P<inner_sign>[-+])?\s*(?:"
    rf"(?P<mantissa>{_DECIMAL})\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*(?:\{{\s*(?P<exponent>[-+]?\d+)\s*\}}|(?P<exponent1>\d))"
    rf"|(?P<whole>\d+)\s*(?:\\frac\s*\{{\s*(?P<over>\d+)\s*\}}\s*\{{\s*(?P<under>\d+)\s*\}}|\s(?P<over1>\d+)\s*/\s*(?P<under1>\d+))"
    rf"|(?P<fraction>{_FRACTION})"
    rf"|(?P<numerator>{_DECIMAL})\s*/\s*(?P<denominator>{_DECIMAL})"
    r"|(?P<repeating>\d*\.\d*)\\overline\s*\{\s*(?P<period>\d+)\s*\}"
    rf"|(?P<decimal>{_DECIMAL})"
    r")\s*(?P<percent>\\?%|percent(?:age)?\b|\\text\s*\{\s*percent\s*\})?\s*"
    rf"(?P<degree>\^\\circ\s*[CF]?)?\s*(?P<unit>{_UNIT})?"
)
_BASED = re.compile(r"(?P<digits>[0-9A-Fa-f]+)\s*_\s*(?:\{\s*)?(?:\\text\s*\{\s*)?(?P<base>[a-z]+|\d{1,2})\s*\}*")
_LARGEST_EXPONENT = 400
_SHORTEST_WORD_UNIT = 3
_NOT_UNITS = frozenset({"pi", "sin", "cos", "tan", "log", "exp", "mod", "and", "sqrt", "infinity", "theta"})

_UNITS = {
    "millimeter": ("mm", "millimeter", "millimetre"), "centimeter": ("cm", "centimeter", "centimetre"),
    "meter": ("m", "meter", "metre"), "kilometer": ("km", "kilometer", "kilometre"), "inch": ("in", "inch", "inche"),
    "foot": ("ft", "foot", "feet"), "yard": ("yd", "yard"), "mile": ("mi", "mile"), "gram": ("g", "gram"),
    "kilogram": ("kg", "kilogram"), "pound": ("lb", "pound", "gbp", "\u00a3"), "ounce": ("oz", "ounce"),
    "liter": ("l", "liter", "litre"),
    "milliliter": ("ml", "milliliter", "millilitre"),
    "second": ("s", "sec", "second"), "minute": ("min", "minute"),
    "hour": ("h", "hr", "hour"), "day": ("day",), "week": ("week",), "month": ("month",), "year": ("yr", "year"),
    "cent": ("cent", "\u00a2"), "dollar": ("dollar", "usd", "$"), "euro": ("euro", "eur", "\u20ac"),
    "yen": ("yen", "jpy", "\u00a5"), "degree": ("deg", "degree"),
    "radian": ("rad", "radian"), "mph": ("mph",), "unit": ("unit",),
}  # fmt: skip
_UNIT_NAMES = {spelling: name for name, spellings in _UNITS.items() for spelling in spellings}
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}


@dataclass(frozen=True)
class Number:
    """An exact number. `places` are the decimal places it was written with, None for a fraction or an integer."""

    value: Fraction
    places: int | None
    percent: bool
    unit: str | None


def tidy(text: str) -> str:
    """`text` without delimiters, spacing commands and final punctuation, in one spelling of LaTeX."""
    text = text.translate(_UNICODE_TABLE)
    text = _SQUARE_ROOT.sub(lambda match: rf"\sqrt{{{match.group(1) or match.group(2)}}}", text)
    text = text.strip()
    for left, right in _WRAPPERS:
        if text.startswith(left) and text.endswith(right) and len(text) > len(left) + len(right):
            inside = text[len(left) : -len(right)]
            if left not in inside:
                text = inside.strip()
    if not _LATEX_SIGNS.isdisjoint(text):
        for pattern, replacement in _SPELLING:
            text = pattern.sub(replacement, text)
    text = " ".join(text.split())
    return text.strip().removeprefix("=").rstrip(".,;:\\").strip()


def without_text(text: str) -> str:
    """`text` without `\\text{}` around words, blanks and the dots of abbreviations."""
    return re.sub(r"\s+|(?<!\d)\.(?!\d)", "", _TEXT_CONTENT.sub(r"\1", text))


def only_number(text: str) -> str | None:
    """The one number among plain words ("about 5", "Day 5"), None if there are several or there is mathematics."""
    found = _NUMBER_AMONG_WORDS.fullmatch(_TEXT_CONTENT.sub(r" \1 ", text).strip())
    return found["number"] if found else None


def spread_plus_minus(text: str) -> str:
    """`a \\pm b` as the two values that it stands for."""
    sign = r"\pm"
    if text.count(sign) != 1 or "," in text:
        return text
    return f"{text.replace(sign, '+')}, {text.replace(sign, '-')}"


def number(text: str) -> Number | None:
    """The exact number that a tidy `text` is, with percent sign and unit; None if it is anything else."""
    match = _NUMBER.fullmatch(text)
    if match is None or not _is_unit(match["unit"]):
        return None
    try:
        value = _value(match)
    except (ValueError, ZeroDivisionError):
        return None
    if "-" in (match["sign"], match["inner_sign"]):
        value = -value
    unit = "degree" if match["degree"] else _unit_name(match["unit"])
    if match["currency"]:
        unit = unit or _UNIT_NAMES[match["currency"][-1]]
    return Number(value, _places(match), match["percent"] is not None, unit)


def _value(match: re.Match[str]) -> Fraction:
    if match["mantissa"]:
        exponent = int(match["exponent"] or match["exponent1"])
        if abs(exponent) > _LARGEST_EXPONENT:
            raise ValueError
        return _fraction(match["mantissa"]) * Fraction(10) ** exponent
    if match["whole"]:
        over, under = match["over"] or match["over1"], match["under"] or match["under1"]
        return int(match["whole"]) + Fraction(int(over), int(under))
    if match["fraction"]:
        parts = re.fullmatch(_FRACTION, match["fraction"])
        assert parts is not None
        return _fraction(parts[1] or parts[2]) / _fraction(parts[3] or parts[4])
    if match["period"]:
        # 0.1\\overline{6}: the period once behind the digits, less what it adds, over 9...9.
        start, period = _fraction(f"0{match['repeating']}0"), match["period"]
        scale = 10 ** len(match["repeating"].partition(".")[2])
        return start + Fraction(int(period), scale * (10 ** len(period) - 1))
    if match["numerator"]:
        return _fraction(match["numerator"]) / _fraction(match["denominator"])
    return _fraction(match["decimal"])


def _fraction(digits: str) -> Fraction:
    return Fraction(digits.replace(",", "").replace(" ", ""))


def _places(match: re.Match[str]) -> int | None:
    decimal = match["decimal"]
    return len(decimal.partition(".")[2]) if decimal and "." in decimal else None


def _is_unit(unit: str | None) -> bool:
    """Whether letters after a number are a unit and not variables or a function."""
    if unit is None or unit.startswith("\\text") or unit[0] in _MONEY_SIGNS:
        return True
    words = re.findall("[a-zA-Z]+", unit)
    if any(word.lower() in _NOT_UNITS for word in words):
        return False
    if unit.startswith("\\frac"):
        return all(word in _UNIT_NAMES for word in words[1:] if word != "text")
    return words[0].lower() in _UNIT_NAMES or len(words[0]) >= _SHORTEST_WORD_UNIT


def _unit_name(unit: str | None) -> str | None:
    """One name for all spellings of a unit; None for no unit or one that is not known (apples, people)."""
    if unit is None:
        return None
    plain = re.sub(r"\\text|[{}]", " ", unit).lower()
    power = re.search(r"\^\s*(\d)", plain)
    words = re.findall(f"[a-z]+|[{_MONEY_SIGNS}]", plain)
    dimension = int(power[1]) if power else 2 if {"square", "sq"} & set(words) else 3 if "cubic" in words else 1
    names = [_UNIT_NAMES.get(word) or _UNIT_NAMES.get(word.removesuffix("s")) for word in words]
    known = [name for name in names if name]
    if not known or "per" in words or "/" in plain or "frac" in words:
        return None
    return known[0] if dimension == 1 else f"{known[0]}^{dimension}"


def based(text: str) -> tuple[str, int] | None:
    """Digits and base of a number such as `1011_2` or `4F_{16}`."""
    match = _BASED.fullmatch(text)
    if match is None:
        return None
    base = int(match["base"]) if match["base"].isdigit() else _BASES.get(match["base"])
    return (match["digits"].upper().lstrip("0"), base) if base else None


def choice_letter(text: str) -> str | None:
    """The letter of an option: `A`, `(A)`, `\\text{(A)}`, `A) 5`, `A. yes`, `(A) 5`."""
    plain = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text).strip()
    match = re.fullmatch(r"\(?\s*([A-Z])\s*(?:\)|[.:](?=\s)|(?=$))(?:.*)", plain, re.DOTALL)
    return match[1] if match else None


def words(text: str) -> str | None:
    """Lower-case words of an answer that is plain words (`\\text{even}`, `Evelyn`), None for mathematics."""
    in_text = re.fullmatch(r"\\text\s*\{([^{}]*)\}", text)
    plain = in_text[1] if in_text else text
    if not re.fullmatch(r"[^\W\d_][^\W\d_ ,.'\u2019-]*(?:[ ,.'\u2019-]+[^\W\d_]+)*[.]?", plain) or len(plain) < 2:
        return None
    return " ".join(re.findall(r"[^\W\d_]+", plain.casefold()))
