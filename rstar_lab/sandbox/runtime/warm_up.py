"""Warm-up code that a zygote runs once per library, so that lazy imports are done and caches filled in forked programs.

A first `solve` takes 48 CPU ms in a process that has only imported sympy, and 16 CPU ms after another equation was solved;
`simplify` and `integrate` gain more. The warm-up uses about 1.5 CPU seconds, while other zygotes already serve.
"""


def sympy() -> None:
    import sympy as sp

    x, y, k, n = sp.symbols("x y k n")
    sp.solve(x**3 - x, x)
    sp.solve([x + y - 1, x - y], [x, y])
    sp.factorint(1001)
    sp.simplify(sp.sin(x) ** 2 + sp.cos(x) ** 2 + sp.sqrt(8))
    sp.integrate(x * sp.exp(x), x)
    sp.diff(x**2 * sp.sin(x), x)
    sp.limit(sp.sin(x) / x, x, 0)
    sp.series(sp.exp(x), x, 0, 3)
    sp.summation(k, (k, 1, n))
    sp.expand((x + 1) ** 3)
    sp.N(sp.pi, 5)
    str(sp.Matrix([[2, 1], [1, 2]]).eigenvals())


LIBRARY_WARM_UPS = {"sympy": sympy}
