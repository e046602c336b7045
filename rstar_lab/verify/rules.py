r"""Tables of the notations that mean the same in an answer. docs/evaluation.md lists them; each row has a test.

A table maps what a model or a data set writes to one LaTeX form. `normalise` applies them.
"""

import re
import unicodedata

# Unicode characters -> LaTeX. Superscripts, subscripts, vulgar fractions and roots are handled in `normalise`.
UNICODE = str.maketrans(
    {
        **dict.fromkeys("−–—‐‑﹣－", "-"),
        **dict.fromkeys("×✕⨯", r"\times "),
        **dict.fromkeys("·⋅∙•", r"\cdot "),
        **dict.fromkeys("\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000", " "),
        **dict.fromkeys("\u200b\u200c\u200d\u2060\u2061\u2062\u2063\ufeff", ""),
        **dict.fromkeys("。．", "."),
        **dict.fromkeys("、，", ", "),
        "；": "; ", "∶": ":", "⁄": "/", "÷": r"\div ", "∕": "/", "≤": r"\leq ", "≦": r"\leq ", "⩽": r"\leq ", "≥": r"\geq ", "≧": r"\geq ",
        "⩾": r"\geq ", "≠": r"\neq ", "≈": r"\approx ", "≡": r"\equiv ", "∈": r"\in ", "∉": r"\notin ", "∪": r"\cup ",
        "∩": r"\cap ", "∖": r"\setminus ", "⊂": r"\subset ", "∅": r"\emptyset ", "⌀": r"\emptyset ", "∞": r"\infty ",
        "±": r"\pm ", "∓": r"\mp ", "°": r"^\circ ", "º": r"^\circ ", "…": r"\ldots ", "⋯": r"\ldots ", "∠": r"\angle ",
        "∴": r"\therefore ",
        "△": r"\triangle ", "→": r"\to ", "⇒": r"\Rightarrow ", "⟨": r"\langle ", "〈": r"\langle ", "⟩": r"\rangle ",
        "〉": r"\rangle ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℚ": r"\mathbb{Q}", "ℕ": r"\mathbb{N}",
        "ℂ": r"\mathbb{C}", "∑": r"\sum ", "∏": r"\prod ", "∫": r"\int ", "⌊": r"\lfloor ", "⌋": r"\rfloor ",
        "⌈": r"\lceil ", "⌉": r"\rceil ", "′": "'", "″": "''", "Å": r"\text{Å}", "％": "%", "﹪": "%",
        "或": ", ", "和": ", ", "“": '"', "”": '"', "‘": "'", "’": "'",
        "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "δ": r"\delta ", "ε": r"\epsilon ", "θ": r"\theta ",
        "λ": r"\lambda ", "μ": r"\mu ", "π": r"\pi ", "ρ": r"\rho ", "σ": r"\sigma ", "τ": r"\tau ", "φ": r"\phi ",
        "ψ": r"\psi ", "ω": r"\omega ", "Δ": r"\Delta ", "Σ": r"\Sigma ", "Ω": r"\Omega ",
    }
)  # fmt: skip

SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ", "0123456789+-=()ni")
SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎", "0123456789+-=()")
VULGAR_FRACTIONS = {
    char: r"\frac{{{}}}{{{}}}".format(*tuple(unicodedata.normalize("NFKC", char).split("⁄")))
    for char in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒"
}

# Commands that only change how the text looks.
FORMATTING = re.compile(
    r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|bigl|bigr|Bigl|Bigr|biggl|biggr|Biggl|Biggr|big|Big|bigg|Bigg"
    r"|left\.|right\.|left(?![a-z])|right(?![a-z])|mleft|mright|strut|mathstrut|centering|noindent|bf|rm|it|sf|tt|em|boldmath"
    r"|tiny|small|normalsize|large|Large|LARGE|huge|Huge)"
    r"(?![A-Za-z])"
)
TEXT_COMMANDS = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|sc|normal|up|md)?|mbox|hbox|emph|underline|math(?:rm|bf|it|sf|tt|normal)|boldsymbol|bm|pmb"
    r"|operatorname\*?)\s*(?=\{)"
)
SPACES = re.compile(
    r"(?<!\\)\\[ ,;:>]|\\(?:quad|qquad|thinspace|enspace|medspace|newline|hfill|space)(?![A-Za-z])|~|\s"
)

# One spelling for commands with the same meaning.
SYNONYMS = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom", "le": "leq", "ge": "geq",
    "leqslant": "leq", "geqslant": "geq", "ne": "neq", "dots": "ldots", "cdots": "ldots", "dotsc": "ldots",
    "dotsb": "ldots", "varnothing": "emptyset", "lbrace": "{", "rbrace": "}", "lbrack": "[", "rbrack": "]",
    "lvert": "|", "rvert": "|", "vert": "|", "mid": "|", "colon": ":", "ast": "*", "lt": "<", "gt": ">", "land": "and ",
    "backslash": "setminus", "jmath": "j", "smallsetminus": "setminus", "rightarrow": "to", "implies": "Rightarrow", "degree": "circ",
    "textdegree": "circ", "imath": "i", "euro": "€", "pounds": "£", "texteuro": "€", "textdollar": "$", "dollar": "$",
    "iff": "Leftrightarrow", "bigcup": "cup", "varepsilon": "epsilon", "varphi": "phi", "vartheta": "theta",
}  # fmt: skip

# Names that models write without a backslash. `normalise` adds max, min, lim and det before a bracket: min is also a unit.
_FUNCTIONS = """arcsin arccos arctan sinh cosh tanh sin cos tan cot csc log ln lg exp sqrt gcd lcm"""
FUNCTIONS = tuple(_FUNCTIONS.split())
SYMBOLS = {
    "pi": r"\pi ",
    "infinity": r"\infty ",
    "Infinity": r"\infty ",
    "inf": r"\infty ",
    "oo": r"\infty ",
    "theta": r"\theta ",
}

CURRENCIES = {
    "USD": "$", "US$": "$", "U.S.$": "$", "$": "$", "dollar": "$", "dollars": "$", "bucks": "$", "cent": "cent",
    "cents": "cent", "¢": "cent", "€": "€", "EUR": "€", "euro": "€", "euros": "€", "£": "£", "GBP": "£", "pounds sterling": "£",
    "¥": "¥", "￥": "¥",
    "yen": "¥", "yuan": "¥", "RMB": "¥", "CNY": "¥", "JPY": "¥", "元": "¥", "₹": "₹", "INR": "₹", "rupees": "₹",
    "Rs": "₹", "Rs.": "₹", "₽": "₽", "₩": "₩",
}  # fmt: skip

# Unit -> its other spellings. A plural with s is added to the long ones.
_UNITS = {
    "nm": "nanometer nanometre", "µm": "micrometer micrometre micron",
    "mm": "millimeter millimetre", "cm": "centimeter centimetre 厘米", "dm": "decimeter", "km": "kilometer kilometre 千米 公里",
    "m": "meter metre 米", "in": "inch inches", "ft": "foot feet", "yd": "yard", "mi": "mile", "mg": "milligram",
    "kg": "kilogram 千克 公斤", "g": "gram 克", "lb": "lbs pound", "oz": "ounce", "t": "ton tonne", "ms": "millisecond",
    "s": "sec secs second 秒", "min": "mins minute 分钟", "h": "hr hrs hour 小时", "day": "days 天", "week": "weeks",
    "month": "months", "year": "yr yrs years 年", "deg": "degree 度", "L": "liter litre l 升", "mL": "milliliter ml",
    "gal": "gallon", "mi/h": "mph", "km/h": "kmh kph kmph", "Hz": "hertz", "kHz": "", "MHz": "", "N": "newton", "J": "joule", "kJ": "",
    "W": "watt", "kW": "", "V": "volt", "A": "amp ampere", "K": "kelvin", "C": "celsius", "F": "fahrenheit", "Pa": "pascal", "kPa": "",
    "mol": "mole", "rad": "radian", "eV": "", "ohm": "", "kohm": "", "Å": "angstrom",
    "acre": "", "rpm": "", "atm": "", "cc": "", "bit": "", "byte": "",
    "unit": "", "rev": "revolution", "erg": "", "pc": "parsec", "kpc": "", "AU": "", "Gyr": "",
}  # fmt: skip
UNITS: dict[str, str] = {}
for _name, _spellings in _UNITS.items():
    for _spelling in (_name, *_spellings.split()):
        UNITS[_spelling] = _name
        if len(_spelling) > 2 and _spelling.isascii():
            UNITS.setdefault(_spelling + "s", _name)
            UNITS.setdefault(_spelling.capitalize(), _name)

# Words that do not end an answer as a unit does: the answer is then a sentence, which is compared as text only.
_NOT_UNITS = """is are was were be not no or and but if when where then than so as at about approx approximately around maybe perhaps
possibly probably mod modulo base wrong incorrect false right correct true never always fails fail failed does rather
instead either neither both nor without except unless more less fewer greater least most plus minus times over am pm
east west north south left up down too even odd prime negative positive undefined none because since for all any only
remainder r can could may might should would exactly otherwise between through until versus vs half halves third
thirds fourth fourths quarter quarters fifth fifths sixth sixths seventh eighth eighths ninth tenth tenths hundredth
hundredths thousandth thousandths squared cubed factorial below above ago choose doubled tripled halved"""
NOT_UNITS = frozenset(_NOT_UNITS.split())
# Words that do not start a noun after a number, as in `3 of the cases`.
PREPOSITIONS = frozenset(("of", "in", "to", "the", "with", "by", "from", "on", "into", "out"))

# Words that multiply a number.
MULTIPLIERS = {
    "hundred": r"\times 10^{2} ", "thousand": r"\times 10^{3} ", "million": r"\times 10^{6} ", "billion": r"\times 10^{9} ",
    "trillion": r"\times 10^{12} ", "dozen": r"\times 12 ",
}  # fmt: skip

# Suffixes of CJK text after a number, which multiply it.
CJK_MULTIPLIERS = {"百": 2, "千": 3, "万": 4, "萬": 4, "만": 4, "百万": 6, "亿": 8, "億": 8, "억": 8}

ALIASES = {
    "dne": "doesnotexist", "nosolutionexist": "nosolution", "undefinded": "undefined",
}  # fmt: skip

_NUMBER_WORDS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
eighteen nineteen twenty"""
NUMBER_WORDS = {name: str(value) for value, name in enumerate(_NUMBER_WORDS.split())}
NUMBER_WORDS |= {
    "thirty": "30",
    "forty": "40",
    "fifty": "50",
    "dozen": "12",
    "onedozen": "12",
    "halfdozen": "6",
    "onehalf": "\\frac{1}{2}",
    "onethird": "\\frac{1}{3}",
}
ALL_REALS = frozenset(
    ("allrealnumber", "allreal", "allreals", "allrealx", "realnumber")
)  # as `normalise.words` writes them
