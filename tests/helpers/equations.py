"""Equations of einsums, drawn."""

from hypothesis import strategies as st


@st.composite
def equations(draw: st.DrawFn) -> tuple[str, list[tuple[int, ...]], int | None]:
    """An equation of two or three operands, their shapes, and an axis of the result or None."""
    sizes = dict(zip("abcdef", draw(st.lists(st.integers(1, 4), min_size=6, max_size=6)), strict=True))
    term = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4, unique=True).map("".join)
    terms = draw(st.lists(term, min_size=2, max_size=3))
    labels = sorted(set("".join(terms)))
    result = "".join(draw(st.permutations(draw(st.lists(st.sampled_from(labels), min_size=1, unique=True)))))
    keys = draw(st.none() | st.integers(-len(result), len(result) - 1))
    return f"{','.join(terms)}->{result}", [tuple(sizes[label] for label in term) for term in terms], keys
