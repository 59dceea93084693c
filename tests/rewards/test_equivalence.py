"""Pairs that people argue about: what is the same answer, and what is not."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewards.answers.equivalence import equivalent

SAME = [
    # fractions and decimals
    (r"\frac{1}{2}", "0.5"),
    (r"\dfrac{1}{2}", r"\frac12"),
    (r"\tfrac{3}{4}", "3/4"),
    (r"-\frac{2}{3}", r"\frac{-2}{3}"),
    (r"\frac{-2}{3}", r"-\dfrac23"),
    ("0.333333", r"\frac{1}{3}"),
    ("2/4", r"\frac{1}{2}"),
    (".5", "0.5"),
    ("5.0", "5"),
    ("18.00", "18"),
    (r"\frac{10}{2}", "5"),
    ("1.5", r"\frac{3}{2}"),
    (r"\frac{\sqrt{3}}{2}", r"\frac{1}{2}\sqrt{3}"),
    (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"),
    # mixed numbers
    (r"3\frac{1}{2}", r"\frac{7}{2}"),
    (r"3 \frac{1}{2}", "3.5"),
    ("3 1/2", r"3\frac{1}{2}"),
    (r"-1\frac{1}{2}", "-1.5"),
    # percent
    (r"50\%", "50"),
    ("50%", "0.5"),
    ("50", r"50\%"),
    ("0.5", r"50\%"),
    ("12.5 percent", "12.5%"),
    (r"33\frac{1}{3}\%", r"33\frac{1}{3}"),
    # thousands
    ("1,234", "1234"),
    ("1{,}234{,}567", "1234567"),
    (r"1\,234", "1234"),
    (r"1,\!234", "1,234"),
    ("$70,000", "70000"),
    (r"\$70{,}000.00", "70000"),
    ("12 345", "12345"),
    # units, currency, trailing words
    ("5 cm", "5"),
    (r"5\text{ cm}", "5"),
    (r"5\,\text{cm}^2", "5"),
    (r"5 \text{ square units}", r"5\text{ units}^2"),
    (r"5\mathrm{~cm}", r"5\ \text{cm}"),
    ("5 centimeters", "5 cm"),
    ("42 apples", "42"),
    (r"18 \text{ dollars}", r"\$18"),
    ("10 hours", "10"),
    (r"12\pi \text{ cm}^2", r"12\pi"),
    (r"60 \text{ mph}", "60"),
    (r"25\text{ miles per hour}", "25"),
    (r"\text{5 feet}", "5"),
    (r"2\sqrt{5} \text{ units}", r"2\sqrt{5}"),
    (r"5\ \mathrm{cm^2}", "5"),
    (r"\text{about } 5", "5"),
    (r"4:30 \text{ p.m.}", r"4:30 \text{ PM}"),
    (r"7 \frac{\text{km}}{\text{h}}", "7"),
    # degrees
    (r"90^\circ", "90"),
    (r"90^{\circ}", r"90^\circ"),
    ("90°", "90"),
    ("90 degrees", r"90^\circ"),
    (r"45\text{ degrees}", "45"),
    (r"\frac{\pi}{2}\text{ radians}", r"\frac{\pi}{2}"),
    # text
    (r"\text{even}", "even"),
    (r"\text{Evelyn}", r"\text{evelyn}"),
    ("Yes", r"\text{yes}"),
    (r"\textbf{No}", "no"),
    (r"\text{(A)}", "A"),
    ("(A)", r"\text{A}"),
    (r"\textbf{(C)}\ 12", r"\text{C}"),
    ("B. 14", "B"),
    (r"\text{neither}", r"\text{Neither}"),
    # names and equations
    ("x = 5", "5"),
    ("5", "x=5"),
    ("x=5", "x = 5"),
    ("y = 2x + 3", "2x+3"),
    ("2x+3", "y=2x+3"),
    ("f(x) = x^2", "x^2"),
    ("y = 2x+3", "y=3+2x"),
    ("x^2 + y^2 = 1", "y^2+x^2-1=0"),
    (r"x = \frac{-1 \pm \sqrt{5}}{2}", r"\frac{-1+\sqrt5}{2}, \frac{-1-\sqrt5}{2}"),
    (r"k \approx 3.14", "3.14"),
    (r"\frac{22}{7} \approx 3.14", r"\frac{22}{7}"),
    (r"x < -2 \text{ or } x > 2", r"(-\infty,-2)\cup(2,\infty)"),
    ("= 5", "5"),
    (r"\frac12", r"P(A) = \frac{1}{2}"),
    (r"2 + 3 = 5", "5"),
    # several values
    ("1, 2", "2,1"),
    (r"x = 1, x = 2", "1,2"),
    (r"x=1 \text{ or } x=2", "1,2"),
    (r"1 \text{ and } 2", "1,2"),
    ("-3, 5", r"5,-3"),
    (r"\{1,2,3\}", "1,2,3"),
    (r"3 \pm \sqrt{2}", r"3+\sqrt{2}, 3-\sqrt{2}"),
    # tuples, points, sets, intervals
    ("(1, 2)", "(1,2)"),
    (r"\left(\frac12, 3\right)", "(0.5,3)"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \pi/2)"),
    ("(1,2), (3,4)", "(3,4),(1,2)"),
    (r"\{2, 1\}", r"\{1,2\}"),
    (r"(-\infty, 3]", r"x \le 3"),
    (r"x \leq 3", r"(-\infty,3]"),
    ("[0,1)", r"0 \le x < 1"),
    (r"x \in [0,1)", "[0,1)"),
    (r"[0, 1) \cup (2, 3]", r"(2,3]\cup[0,1)"),
    (r"(-\infty, -2) \cup (2, \infty)", r"(2,\infty)\cup(-\infty,-2)"),
    (r"(3, +\infty)", r"(3,\infty)"),
    (r"\varnothing", r"\emptyset"),
    # matrices
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1 & 2 \\ 3 & 4\end{bmatrix}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    (r"\begin{pmatrix} 1/2 \\ 0 \end{pmatrix}", r"\begin{pmatrix} \frac12 \\ 0 \end{pmatrix}"),
    # algebra
    ("(x-1)(x+1)", "x^2-1"),
    (r"\sqrt{12}", r"2\sqrt{3}"),
    (r"2\sqrt3", r"2\sqrt{3}"),
    (r"x^{2}+2x", "2x + x^2"),
    (r"\frac{x}{2}", r"\frac12 x"),
    (r"2 \cdot 3", "6"),
    (r"2^{10}", "1024"),
    (r"10!", "3628800"),
    (r"\binom{5}{2}", "10"),
    (r"\log_2 8", "3"),
    ("6-5i", r"6 - 5\mathrm{i}"),
    ("1+2i", "2i+1"),
    (r"11\sqrt{2}", r"11\sqrt2"),
    (r"0.\overline{3}", r"\frac{1}{3}"),
    (r"0.1\overline{6}", r"\frac{1}{6}"),
    ("√3", r"\sqrt{3}"),
    ("2π", r"2\pi"),
    ("x²+1", "x^2+1"),
    # scientific notation, bases, ratios
    (r"2.5 \times 10^{3}", "2500"),
    (r"6 \times 10^{-3}", "0.006"),
    ("1011_2", "1011_{2}"),
    ("4343_6", r"4343_{\text{six}}"),
    ("2516", "2516_8"),
    ("3:4", "3 : 4"),
    # delimiters
    ("$5$", "5"),
    (r"\(5\)", "5"),
    ("5.", "5"),
    ("**5**", "5"),
    (r"\displaystyle \frac{1}{2}", r"\frac{1}{2}"),
    (r"{5}", "5"),
]

DIFFERENT = [
    ("0.33", r"\frac{1}{3}"),
    ("0.3333", r"\frac{1}{3}"),
    ("3.14", r"\pi"),
    ("1.5708", r"\frac{\pi}{2}"),
    ("0.67", r"\frac{2}{3}"),
    ("5", "-5"),
    ("12", "123"),
    ("1234", "1,235"),
    ("1.234", "1,234"),
    ("0.5%", "50"),
    (r"5\%", "0.5"),
    ("5 cm", "5 m"),
    (r"5\text{ hours}", r"5\text{ minutes}"),
    (r"5\text{ cm}^2", r"5\text{ cm}^3"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "[1,2]"),
    ("[0,1)", "[0,1]"),
    ("1,2", "1,2,3"),
    ("1", "1,2"),
    ("1,2", "1"),
    ("1,1,2", "1,2,3"),
    (r"\{1,2\}", r"\{1,3\}"),
    ("x=1", "x=2"),
    ("y = 2x + 3", "y = 3x + 2"),
    ("2x+3", "2x-3"),
    (r"2\sqrt{3}", r"3\sqrt{2}"),
    ("1011_2", "1011_3"),
    ("1011_2", "1101_2"),
    (r"\text{even}", r"\text{odd}"),
    ("even", "neve"),
    ("yes", "no"),
    (r"\text{(A)}", r"\text{(B)}"),
    ("A", "B"),
    (r"\frac{1}{2}", r"\frac{2}{1}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"),
    ("x > 3", r"x \ge 3"),
    (r"(-\infty, 3)", r"(-\infty,3]"),
    ("3:4", "4:3"),
    (r"\emptyset", "0"),
    ("x^2", "x^3"),
    ("", "5"),
    ("5", "6"),
    ("0.0000001", "0"),
    ("10^6", "10^5"),
    (r"\frac{1}{10^7}", "0"),
    ("p - q", "q - p"),
    ("i", "-i"),
    (r"30^\circ", "60"),
    ("2 + 3 = 6", "5"),
    ("5 or 6", "5"),
    (r"\infty", r"-\infty"),
    (r"\text{no solution for } 5", "6"),
    ("x + + 5", "5"),
    ("5x", "5"),
    (r"\lfloor x \rfloor", "x"),
    (r"\lfloor x \rfloor", r"\lceil x \rceil"),
    (r"x^5 + x < 1 \text{ or } x^5 + x > 9", "x > 1"),
    ("5", "x+y=5"),
    ("5 of 6", "5"),
    (r"\frac{1}{23}", r"\frac{12}{3}"),
    (r"0.\overline{3}", "0.3"),
]


@pytest.mark.parametrize(("answer", "label"), SAME)
def test_same(answer: str, label: str) -> None:
    assert equivalent(answer, label)


@pytest.mark.parametrize(("answer", "label"), DIFFERENT)
def test_different(answer: str, label: str) -> None:
    assert not equivalent(answer, label)


@pytest.mark.parametrize("answer", sorted({answer for pair in SAME for answer in pair}))
def test_every_answer_equals_itself(answer: str) -> None:
    assert equivalent(answer, answer)


NUMERATORS = st.integers(-(10**6), 10**6)
DENOMINATORS = st.sampled_from([1, 2, 4, 5, 8, 10, 16, 20, 25, 100, 125, 1000])


def spellings(value: Fraction) -> list[str]:
    """Ways to write a number whose decimals end."""
    over, under = value.numerator, value.denominator
    decimal = f"{float(value):.10f}"
    sign = "-" if over < 0 else ""
    whole, rest = divmod(abs(over), under)
    return [
        f"{over}/{under}",
        rf"\frac{{{over}}}{{{under}}}",
        rf"{sign}\dfrac{{{abs(over)}}}{{{under}}}",
        decimal,
        decimal.rstrip("0").rstrip("."),
        f"${sign}{abs(float(value)):,.10f}$",
        rf"{float(value) * 100:.8f}\%",
        rf"{sign}{whole}\frac{{{rest}}}{{{under}}}",
        f"x = {decimal}",
        rf"{decimal} \text{{ cm}}",
    ]


@settings(max_examples=25)
@given(NUMERATORS, DENOMINATORS)
def test_a_number_in_any_spelling_is_that_number_and_no_other(numerator: int, denominator: int) -> None:
    value = Fraction(numerator, denominator)
    for answer in spellings(value):
        for label in spellings(value)[:5]:
            assert equivalent(answer, label), (answer, label)
            other = value + Fraction(1, 1000)
            assert not equivalent(spellings(other)[1], label), (other, label)


@pytest.mark.parametrize(("answer", "label"), [("x = 5", "y = 5"), ("f(x) = 2x+3", "g(x) = 2x+3")])
def test_a_value_of_another_name_is_another_answer(answer: str, label: str) -> None:
    assert not equivalent(answer, label)


def test_a_fraction_answers_its_rounded_label() -> None:
    assert equivalent(r"\frac{1}{3}", "0.333333") and equivalent(r"\frac{2}{3}", "0.6666667")
    assert not equivalent(r"\frac{1}{3}", "0.33333") and not equivalent(r"\frac{1}{3}", "0.333334")


def test_a_unit_over_a_unit_is_its_abbreviation() -> None:
    assert equivalent("25 miles per hour", "25 mph")


@pytest.mark.parametrize(
    ("spellings", "others"),
    [
        (["$5", r"\$5", "5 dollars", "5 USD", r"5 \text{ dollars}"], ["\u20ac5", "5 euros", "5 cents"]),
        (["\u20ac5", "5 \u20ac", "5\u20ac", "5 euros", "5 EUR", r"\euro 5"], ["$5", "\u00a35", "5 yen"]),
        (["\u00a35", "5 \u00a3", "5 pounds", r"\pounds 5"], ["\u20ac5", "$5"]),
        (["\u00a55", "5 yen", "5 \u00a5"], ["$5"]),
        (["50 cents", "50\u00a2", r"50 \text{ cents}"], ["$50"]),
    ],
)
def test_money_is_the_same_by_sign_and_by_word_and_each_currency_its_own(
    spellings: list[str], others: list[str]
) -> None:
    for one in spellings:
        assert all(equivalent(one, other) for other in spellings), one
        assert not any(equivalent(one, other) or equivalent(other, one) for other in others), one
