"""The rules of docs/evaluation.md: which answers are equal. Each row is tested with answers of several forms."""

import time

import pytest

from rstar_lab.verify import same_answer, verify, warm_up
from rstar_lab.verify.comparison import quick


@pytest.fixture(scope="module", autouse=True)
def warm():
    warm_up()


RULES: dict[str, tuple[list[tuple[str, str]], list[tuple[str, str]]]] = {
    "layout": (
        [
            (r"\dfrac12.", r"$\frac{1}{2}$"), (r"\displaystyle\frac{1}{2}", "0.5"), ("(6,5).", "(6,5)"), ("Yes.", "Yes"),
            (r"\textcolor{red}{42}", "42"), ("**73**", "73"), (r"42~", "42"), (r"42\\", "42"), (r"\mathsf{42}", "42"),
            (r"\left(3,\frac{\pi}{2}\right)", r"(3, \frac{\pi}{2})"), (r"\(42\)", "42"), ("42,", "42"),
            (r"\begin{cases} 1 & x > 0 \\ 2 & x < 0 \end{cases}", r"\begin{cases}1&x>0\\2&x<0\end{cases}"),
            (r"\left[\begin{array}{cc}1 & 2\\3 & 4\end{array}\right]", r"\begin{bmatrix}1&2\\3&\frac{8}{2}\end{bmatrix}"),
            (r"\frac{1}{2}, 3", r"$\frac{1}{2}$, 3"), ("221, 8", "$221,$8$"), (r"{\bf 42}", "42"), (r"\#42", "42"),
            (r"{\large 42}", r"42"),
            (r"*42*", r"42"),
            (r"__42__", r"42"),
            (r"\begin{equation} 42 \end{equation}", r"42"),
            (r"\begin{align*} x &= 42 \end{align*}", r"42"),
            (r"\pi\text{r}", r"\pi r"),
            (r"【42】", r"42"),
            (r"\langle 1,2,3\rangle", r"(1,2,3)"),
            (r"A(1,2)", r"(1,2)"),
            (r"\begin{cases} -x & x<0 \\ x & \text{if } x \ge 0 \end{cases}", r"f(x)=\begin{cases} x, & x\geq 0\\ -x, & x<0\end{cases}"),
            (r"\begin{cases}x=1\\y=2\end{cases}", r"(1,2)"),
            (r"\begin{pmatrix}0.5&1\end{pmatrix}", r"\begin{pmatrix}\frac12&1\end{pmatrix}"),
            (r"\vec{v}=\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"),
            (r"\begin{pmatrix}3\\-1\end{pmatrix},\begin{pmatrix}0.5\\1\end{pmatrix}",
             r"\begin{pmatrix}\frac12\\1\end{pmatrix}, \begin{pmatrix}3\\-1\end{pmatrix}"),
            (r"A=\begin{pmatrix}0.5\\1\end{pmatrix}", r"A=\begin{pmatrix}\frac12\\1\end{pmatrix}"),
            (r"\hat{i}+2\hat{j}", r"\mathbf{i}+2\mathbf{j}"), (r"\mathbf i-\mathbf j", r"\mathbf{i}-\mathbf{j}"),
            (r"\therefore 42", "42"), ("∴ 42", "42"), (r"\ddot\theta", r"\ddot{\theta}"), (r"\varepsilon_0", r"\epsilon_0"),
        ],
        [
            ("42 43", "4243"), ("42 43", "42"), (r"42\quad43", "42"), ("2 2/3", "2"), ("221", "$221,$8$"),
            (r"\begin{cases}1&x>0\\2&x<0\end{cases}", r"\begin{cases}1&x>0\\3&x<0\end{cases}"),
            (r"\begin{cases} x & x \ge 0 \\ -x & x < 0 \end{cases}", r"\begin{cases} x & x>0\\ -x & x<0\end{cases}"),
            (r"\begin{pmatrix}1&1\end{pmatrix}", r"\begin{pmatrix}1\\1\end{pmatrix}"),
            (r"\begin{pmatrix}1\\1\end{pmatrix},\begin{pmatrix}1\\1\end{pmatrix}",
             r"\begin{pmatrix}1\\1\end{pmatrix},\begin{pmatrix}1\\2\end{pmatrix}"),
            (r"A=\begin{pmatrix}1\\1\end{pmatrix}", r"B=\begin{pmatrix}1\\1\end{pmatrix}"),
            (r"\begin{cases}x=1\\y=2\end{cases}", r"x=2,y=1"), (r"\langle 1,2\rangle", r"\langle 2,1\rangle"),
        ],
    ),
    "unicode": (
        [
            ("2√3", r"2\sqrt{3}"), ("x²", "x^2"), ("½", "0.5"), ("−5", "-5"), ("–5", "-5"), ("36π", r"36\pi"),
            ("(−∞,3]", r"(-\infty,3]"), ("x≤3", r"x \leq 3"), ("2×3", "6"), ("5，6", "5,6"), ("１２３", "123"), ("١٨", "18"), ("60°", "60"),
            ("50％", "50"), ("x₁", "x_1"), ("2½", "2.5"),
            (r"3⁄4", r"0.75"),
            (r"∛8", r"2"),
            (r"6π cm²", r"6\pi"),
        ],
        [("x²", "x_2"), ("√3", "3"), ("−5", "5"), ("½", "2")],
    ),
    "numbers": (
        [
            ("8.7e8", "870000000"), ("870000000", r"8.7\times10^8"), ("4190000.0", "4.19e6"), ("0.333333", r"\frac13"),
            ("0.666667", r"\frac23"), ("3.141593", r"\pi"), ("1.25664e-6", r"4\pi\times10^{-7}"), ("1{,}234", "1234"),
            (r"1\,234.50", "1234.5"), (r"0.\overline{3}", r"\frac13"), (r"3.\overline{6}", r"\frac{11}{3}"),
            ("1 1/4", "5/4"), (r"-2\frac{1}{2}", "-2.5"), ("5e3", "5000"), (r"\frac{1}{20!}", r"\frac{1}{20\cdot 19!}"),
            (r"1'234", r"1234"),
            (r"1.5 X 10^{-4}", r"1.5e-4"),
            (r"twelve", r"12"),
            (r"\text{Three}", r"3"),
            (r"one half", r"\frac12"),
            (r"12 out of 30", r"0.4"),
            (r"5万", r"50000"),
            (r"3.5亿", r"350000000"),
            ("5 and 1/2", "5.5"), (r"5\text{ and }\frac12\text{ inches}", r"\frac{11}{2}"), ("3.75", "3 and 3/4"),
            ("5 and 1/2", "1/2, 5"), ("7 (seven)", "7"), (r"\text{twelve (12)}", "12"),
        ],
        [
            ("0.33", r"\frac13"), ("0.0", "2.88e-19"), ("-2.88e-19", "2.88e-19"), ("9.1e-31", "2.88e-19"),
            ("1.0", r"1-\frac{1}{2^{30}}"), (r"2-\frac{1}{2^{2023}}", r"2-\frac{1}{2^{2024}}"), (r"\frac{1}{20!}", r"\frac{1}{21!}"),
            ("0.00000006", "0.00000007"), ("3.14159", "3.141592653589793"), ("4.5e33", "4.5000001e33"), ("0", r"0.\overline{3}"),
            ("2+3", "0.123456"), (r"\sqrt{2}", "3.141593"), ("11: 4", ".999996"), ("3.141593", r"\frac{\sqrt{2}}{2}"),
            (r"\sqrt{2}+10^{-20}", r"\sqrt{2}"), ("3.14", r"\pi"), ("0.1666667", r"\frac{1}{7}"),
            (r"twelve", r"11"), (r"12 out of 30", r"12"), (r"5万", r"5"), (r"42...", r"42"), (r"0.333...", r"0.333"),
            ("5, 1/2", "5.5"), ("5 or 1/2", "5.5"), ("5 and 3/2", "6.5"), ("5 and 1/2", "5"), ("7 (eight)", "7"),
            ("7 (eight)", "8"), ("7 (7)", "7"),
        ],
    ),
    "percentages": (
        [
            (r"50\%", "50"), (r"50\%", "0.5"), ("0.5", r"50\%"), (r"12.5\%", r"12\frac{1}{2}\%"), (r"\frac{100}{3}\%", r"\frac13"),
            (r"33\frac13\%", r"\frac{100}{3}"), ("50 percent", "50"), (r"200\%", "2"), (r"50\%.", "50"),
        ],
        [("0.05", r"0.05\%"), (r"0.5\%", "0.5"), (r"5\%", "0.5"), (r"49\%", r"50\%"), ("12", r"12\frac{1}{2}\%"), (r"50\%", "5")],
    ),
    "units": (
        [
            ("5 cm", "5"), (r"5\text{ cm}", "5"), (r"5\text{ centimeters}", "5 cm"), (r"64 \mathrm{~cm}^2", r"64\text{ cm}^2"),
            ("64 square feet", "64"), (r"\frac{3}{4}\text{ hours}", r"\frac34"), ("42 apples", "42"), ("5个", "5"), ("5元", "5"),
            ("42", "42 wibbles"),
            ("5平方厘米", "5"), (r"\$36", "36"), ("36", r"\$36"), ("32,348", r"\$32,348"), (r"\$18.9", r"\$18.90"), ("€5", "5"),
            ("5 USD", "5"), ("5 dollars", r"\$5"), (r"90^\circ", "90 degrees"), ("4 4/9 days", r"$4 \frac{4}{9}$ days"),
            ("42nd", "42"), ("1.5 million", "1500000"), (r"\$5\text{ million}", "5000000"),
            ("5 m", r"5\text{ m}"), ("5 m", "5"),
            (r"3\times 10^{8}\,\mathrm{m\,s^{-1}}", "3e8"), ("9.8 m/s^2", r"9.8 \mathrm{~m} / \mathrm{s}^{2}"),
            (r"42^{\text{nd}}", "42"), (r"\textbf{(A)}\ 42", "42"), (r"\$18\text{ per day}", "18"),
            (r"5 μm", r"5\ \mu\text{m}"),
            (r"5\ \Omega", r"5"),
            (r"9.8\,\frac{\text{m}}{\text{s}^2}", r"9.8 m/s^2"),
            (r"25^\circ\text{C}", r"25"),
            (r"32° \mathrm{F}", r"$32^{\circ} \mathrm{F}$"), (r"\mathbf{32^{\circ} \mathrm{F}}", r"32^\circ F"),
            (r"6\sqrt{2} m", r"6\sqrt2"),
            (r"Rs. 500", r"500"),
            (r"6.6e-34 \mathrm{~J} \cdot \mathrm{s}", r"6.6e-34"), ("12 cubic meters", "12 m^3"), ("12 m^2", "12"),
            ("12 sq. m", "12 m^2"),
            ("25 °C", "25 degrees Celsius"), ("10 kg m/s", "10"), ("9.8 m s^{-2}", "9.8"), ("5 N m", "5"), ("30 sec", "30"),
            ("$3/kg", "3"),
            (r"t=5\text{ s}", "5 s"), ("a dozen", "12"),
        ],
        [
            ("5 m", "5 cm"), (r"\$5", "€5"), ("6 cm", "5 cm"), (r"\$6", "5"), ("5 apples", "5 pears"), ("3:30 p.m.", "3:30 a.m."),
            ("42 wibbles", "42"), ("42 gribbles", "42 wibbles"),
            (r"45^\circ 30'", r"45^\circ 20'"), ("5x", "5"), ("5 is wrong", "5"),
            ("1.5 million", "1.5"), ("3 quarters", "3"), ("5 squared", "5"),
            ("30°", r"30\%"), ("5 m^2", "5 m^3"), ("5m", "5"), ("6", "6m"), ("2 hours 30 minutes", "2"),
            (r"500 nm", r"500\ \mu\text{m}"),
            (r"25^{\circ} \mathrm{C}", r"25^\circ F"),(r"42以上", r"42"), (r"42左右", r"42"), (r"42未満", r"42"), (r"3分之1", r"3"),
            ("5 too many", "5"), ("36 doubled", "36"), (r"12\text{ m}^2", "12 m^3"),
            (r"42厘米", r"42米"), (r"42 zzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzz", r"42"),
        ],
    ),
    "complex numbers": (
        [
            ("27+38i", "$27+38 i$"), (r"2i\sqrt{3}", r"2 \sqrt{3} i"), (r"5\cdot i", "5i"), ("i^2", "-1"), ("(1+i)^2", "2i"),
            (r"\sqrt{-9}", "3i"), (r"e^{i\pi}", "-1"), (r"\frac{1}{i}", "-i"), (r"1\pm 2i", r"1 \pm 2 i"), ("2+3i, 2-3i", r"2 \pm 3 i"),
            (r"e^{i\pi/3}", r"\frac12+\frac{\sqrt3}{2}i"), ("ai", "a i"), ("3 + 4*I", "3+4i"),
            (r"2\operatorname{cis}\frac{\pi}{3}", r"1+\sqrt3i"), (r"2\,\text{cis}\,\pi", "-2"),
        ],
        [("I_1", "I_2"), ("I^2R", "-R"), ("i", "I_0"), ("3+2i", "3-2i"), ("i", "1"), ("2i", "-2i"), (r"a_i", "a"),
         (r"\sum_{i=1}^{n} i", "ni")],
    ),
    "notation": (
        [
            ("10^-5", "10^{-5}"), (r"1\times 10^-5", "1e-5"), ("x^-1", r"\frac1x"), ("e^-x", "e^{-x}"), ("2**10", "1024"),
            (r"3\sqrt10", r"3\sqrt{10}"), ("sqrt(2)/2", r"\frac{\sqrt2}{2}"), ("2*pi", r"2\pi"), ("log(2)", r"\log 2"),
            ("x^(1/2)", r"\sqrt{x}"), (r"\sqrt{1/n}", r"\frac{1}{\sqrt n}"), (r"\sqrt[3]{-8}", "-2"), (r"\sin 30^\circ", r"\frac12"),
            (r"\emptyset", r"\varnothing"), ("|x-1|<-2", r"\emptyset"), (r"\min\{3,5\}", "3"), ("^{1}/_{2}", "0.5"), (r"\lg 1000", "3"),
            (r"\sum_{n=1}^{\infty}\frac{1}{n^2}", r"\frac{\pi^2}{6}"), (r"\frac{x^2-1}{x-1}", "x+1"), ("{1 \\over 2}", "0.5"),
            (r"x^{2/3}", r"\sqrt[3]{x^2}"), (r"2\gamma", r"\gamma\cdot2"), (r"\Gamma(5)", "24"), (r"\binom71", "7"),
            (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", "-2"), (r"2\det\begin{pmatrix}1&2\\3&4\end{pmatrix}", "-4"),
            (r"\left|\begin{array}{cc}a&b\\c&d\end{array}\right|", "ad-bc"),
            (r"\begin{vmatrix}1&2&0\\3&4&1\\-1&0&2\end{vmatrix}", "-6"), (r"\operatorname{lcm}(4,6)", "12"),
            (r"\mathrm{sin}x", r"\sin x"), (r"\mathrm{log}_2 8", "3"),
        ],
        [(r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
         (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", "2"),
         (r"\frac112", r"\frac{1}{12}"), ("x^2y", "x^{2y}"), (r"\sqrt{x^2}", "x"), ("7!!", "7!"), ("2^10", "20"), ("x+1", "x-1")],
    ),
    "lists": (
        [
            (r"1\pm\sqrt2", r"1-\sqrt2, 1+\sqrt2"), ("1 or 2", "2,1"), (r"\{1,2\}", "2, 1"), ("x=1, x=2", "1,2"),
            (r"\{1,2,3,4\}", r"\{1,3\}\cup\{2,4\}"), ("(1,2),(3,4)", "(3,4), (1,2)"), ("(1,2)", "(x,y)=(1,2)"),
            ("x=5或x=6", "5,6"), (r"\frac{1\pm\sqrt5}{2}", r"\frac{1+\sqrt5}{2}, \frac{1-\sqrt5}{2}"),
            (r"[1,2,3]", r"1,2,3"),
            (r"(x, y) \in \{(0,0), (1,1)\}", r"(0,0),(1,1)"), ("A & C", "A,C"), ("Mary and John", "John, Mary"),
            ("x=1 and x=2", "x=1 or x=2"),
        ],
        [
            ("(1,2)", "(2,1)"), ("42", "42, 43"), ("42 or 43", "42"), (r"\{42,43\}", "42"), ("1,2,3", "1,2"),
            (r"1,2,\ldots,42", "42"), ("2", r"\frac{1\pm\sqrt5}{2}"), (r"1, 3, 5, \ldots, 2n-1", r"1, 2, \ldots, n"),
            (r"[1,2]", r"1,2"), ("John or Mary", "John and Mary"), ("A or B", "A, B"), (r"\text{red or blue}", r"\text{red and blue}"),
            ("x=1 and y=2", "x=1 or y=2"), (r"\{\emptyset\}", r"\emptyset"),
        ],
    ),
    "intervals": (
        [
            ("x>2", r"(2,\infty)"), (r"\{x\mid x>0\}", r"(0,\infty)"), ("1>x>-1", "-1<x<1"), ("]1,2[", "(1,2)"),
            (r"m\geq\sqrt{2}", r"m\in[\sqrt{2},+\infty)"), (r"(1,2)\cup(3,4)", r"(3,4)\cup(1,2)"),
            (r"(-\infty,0)\cup(0,\infty)", r"\mathbb{R}\setminus\{0\}"), ("x<-1 or x>1", r"(-\infty,-1)\cup(1,\infty)"),
            (r"x>1\text{ and }x\leq2", r"(1,2]"),
            (r"all real numbers", r"\mathbb{R}"),
            (r"x\neq 2", r"(-\infty,2)\cup(2,\infty)"), ("|x|≤3", "-3≤x≤3"), (r"\mathbb R", r"(-\infty,\infty)"),
            (r"\{(x,y)\mid x+y=1\}", r"\{(x,y) : x+y=1\}"), ("x<-1 and x>1", "x>1 or x<-1"),
            (r"\frac1x>2", r"(0,\frac12)"), (r"\{1,2,3\}", r"\{x\in\mathbb{Z} \mid 1\le x\le 3\}"), ("x^2<2", r"(-\sqrt2,\sqrt2)"),
            (r"x\ge0.333333", r"x\ge\frac13"), (r"\sqrt{x}<2", "[0,4)"), (r"x^2\ge0", r"\mathbb{R}"),
        ],
        [("[1,2)", "[1,2]"), ("y>2", r"y\ge2"),
            (r"\mathbb{Z}\cap[1,\infty)", r"\{1,2,3\}"), (r"e<x<\pi", "(e,3)"),
            ("x<42", "42"), ("x<3", r"(-\infty,4)"), (r"(1,2)\cup(3,4)", r"(1,2)\cup(3,5)"),
            (r"x>1 and x<2", r"\mathbb{R}"), (r"x\neq2", r"2"), ("x>1 or x<2", "x>1 and x<2"), ("|x|<3", "-3≤x≤3"),
            (r"x\neq 2", r"(-\infty,2)\cup(3,\infty)"),
        ],
    ),
    "equations": (
        [
            ("y=2x+1", "2x-y+1=0"), ("N=42", "42"), ("2+40=42", "42"), ("x+1", "y=x+1"), (r"\approx 33.3", "33.3"), ("约等于5", "5"),
            (r"\frac{x^2}{4}+\frac{y^2}{3}=1", "3x^2+4y^2=12"), ("90", r"\angle ABC = 90^\circ"), ("f(42)=43", "43"),
            (r"f(x)=x^2", r"y = x^2"),
            (r"f'(x)=2x", r"2x"),
            (r"x=1, y=2", r"(x,y)=(1,2)"), ("42=x", "42"), ("v(t)=at", "at"), (r"y^{\prime}=2x", "y'=2x"),
            (r"f^{-1}(x)=\frac{x-1}{2}", r"f^{-1}(x)=\frac12(x-1)"),
        ],
        [
            ("43=42", "42"), ("x=43=42", "42"), ("x=42=43", "42"), (r"42\approx43", "42"), ("y=x+2", "x+1"), ("x=1", "y=1"),

            (r"\frac{x^2}{16}+\frac{y^2}{12}=1", r"\frac{x^2}{4}+\frac{y^2}{3}=1"), ("6", "x+y=6"),
            (r"t=\frac{\ln 5}{0.1}=10\ln 2", r"t=\frac{\ln 2}{0.1}=10\ln 2"), ("3", r"\log_{6}(216)=3"),
            (r"\frac{dM}{dt}=\frac{M^6}{c^9}", r"\frac{dM}{dt}=\frac{M^6}{c^6}"), (r"43\to42", "42"),
            (r"f(x)=x^2", r"g(x)=x^2"), (r"f'(x)=3x", r"2x"),
        ],
    ),
    "bases, congruences, times": (
        [
            ("4210", "4210_5"), ("4210_5", "4210_{5}"), (r"3\pmod 7", r"x \equiv 10 \pmod{7}"), ("3", r"x\equiv 3\pmod 7"),
            (r"42 \pmod{100}", "42"), (r"x \equiv 3 \pmod{7}", r"x\equiv 3\pmod 7"), ("4:6", "2:3"), ("12:30", "12:30"),
            (r"101 base 2", r"101_2"),
            (r"101 (base 2)", r"101_{2}"),
            (r"x = 3 (mod 7)", r"x\equiv3\pmod7"), ("101_{(2)}", "101_2"), ("12 R 3", "12 remainder 3"), ("8 a.m.", "8 am"),
            ("1001_two", "1001_2"),
        ],
        [
            ("1011_2", "1011_3"), ("4210_6", "4210_5"), ("555_{10}", "4210_5"), ("12:30", "12"), ("7", r"x\equiv 3\pmod 7"),
            (r"x\equiv 3\pmod 7", r"x\equiv 4\pmod 7"), ("13 (mod 42)", "42"), (r"1011_\text{two}", r"1011_\text{three}"),
            ("5 R 3", "5 R 4"), (r"x\equiv 3\pmod 7", r"x\equiv 3\pmod 8"),
            (r"101 base 3", r"101_2"), ("36 mod 5", "36"), ("FF_{16}", "FE_{16}"),
        ],
    ),
    "words": (
        [
            ("Yes.", r"\text{yes}"), ("(A)", "A"), ("A.", "A"), (r"\textbf{(A)}", "A"), (r"\text{no solution}", "No solution"),
            ("DNE", r"\text{DNE}"), ("是", "是"), ("xy", "yx"),
            (r"no real solutions", r"\text{no real solution}"),
            (r"\text{Alice and Bob}", r"Alice and Bob"),
            (r"B: 42", r"B"),
            (r"B. 42", r"42"),
        ],
        [
            ("BADC", "ABCD"), ("LISTEN", "SILENT"), ("aabb", "abab"), ("EDC", "CDE"), (r"\text{odd}", r"\text{even}"), ("B", "A"),
            (r"\overline{AB}", r"\overline{CD}"), ("否", "是"),
            (r"(A)(B)", r"A"), (r"(A) 42 (B) 43", r"A"),
        ],
    ),
    "a number inside a text": (
        [],
        [
            ("43 (or 42)", "42"), ("41, 43 (or 42)", "42"), ("43; or 42", "42"), ("43? 42", "42"), (r"43 (or \frac{1}{2})", r"\frac12"),
            ("2x+1 (or 42)", "42"), (r"13 \text{ (mod } 42)", "42"), (r"42\text{ is wrong}", "42"), ("not 42", "42"),
            ("42 (or 43)", "42"),
            ("!5", "5!"), (r"10^{7-}", "10^{-7}"), (r"\frac{}1{2}", r"\frac12"), ("(11 5/6", "11 5/6"),
            ("no more than 42", "42"), ("43 rather than 42", "42"), (r"\neq42", "42"), ("42?", "42"), ("43 (= 42 + 1)", "42"),
            (r"\text{not }42", "42"), ("between 1 and 42", "42"), (r"42\text{ or }43", "42"), ("42 maybe", "42"),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_equal_answers(rule):
    assert [pair for pair in RULES[rule][0] if not same_answer(*pair)] == []


@pytest.mark.parametrize("rule", RULES)
def test_different_answers(rule):
    assert [pair for pair in RULES[rule][1] if same_answer(*pair)] == []


@pytest.mark.parametrize(
    ("text", "answer_format", "answer", "equal"),
    [
        (r"The roots are $\boxed{3}$ and $\boxed{5}$.", "boxed", "3,5", True),
        (r"The roots are $x = \boxed{-2}$ or $x=\boxed{1}$.", "boxed", "1,-2", True),
        (r"$\boxed{3}$ or $\boxed{5}$", "boxed", "5", False),
        (r"First \boxed{3}. Then we get \boxed{5}.", "boxed", "5", True),
        (r"\boxed{42} as asked in \boxed{}", "boxed", "42", True),
        (r"The answer is $\boxed2$.", "boxed", "2", True),
        (r"The answer is $\boxed\frac12$.", "boxed", "0.5", True),
        (r"\fbox{42}", "boxed", "42", True),
        ("答案是18。", "last_number", "18", True),
        ("共18元", "last_number", "18", True),
        ("всего18", "last_number", "18", True),
        ("No.18", "last_number", "18", True),
        ("It is −5", "last_number", "-5", True),
        ("It is −5", "last_number", "5", False),
        (r"\boxed{1{,}234}", "last_number", "1234", True),
        (r"1\,234", "last_number", "1234", True),
        ("The answer is 3.5e3", "last_number", "3500", True),
        ("x18", "last_number", "18", False),
        ("It loses -$18", "last_number", "-18", True),
        ("3×10⁴", "last_number", "30000", True),
        ("10^5", "last_number", "5", False),
        ("2½ cups", "last_number", "2.5", True),
        ("1 1/2 cups", "last_number", "1.5", True),
        (r"\boxed{\frac{1}{2}}", "last_number", "2", False),
        (r"So 2 \frac{1}{2}", "last_number", "2.5", True),
        ("12 m^2", "last_number", "12", True),
        (r"\boxed{41}\quad\boxed{42}", "boxed", "42", False),
        ("- $\\boxed{3}$\n- $\\boxed{5}$", "boxed", "3,5", True),
        (r"\boxed{42} \boxed{42}", "boxed", "42", True),
        (r"\framebox{42}", "boxed", "42", True),
    ],
)
def test_where_the_answer_is_read(text, answer_format, answer, equal):
    assert verify(text, answer, answer_format=answer_format) is equal


@pytest.mark.parametrize(
    "text",
    [
        "\\text{ m }$" * 18,
        "\\text{m m m }" * 15,
        "5 " + "m " * 99,
        "5 " + "square " * 28,
        "½" * 200,
        "(" * 200,
        "5\\text{" + "m " * 90,
        "m " * 40 + "(" + "m " * 40 + ")",
        "\\begin{vmatrix}" * 13,
    ],
)
def test_hostile_text_does_not_slow_the_reading_of_answers(text):
    started = time.process_time()
    quick(text[:200], "5")
    assert time.process_time() - started < 0.3
