"""The table of ``make mutate`` fits the tree, and its runner tells caught from survived."""

import pytest

from tests.mutations import HOST_CASE, HOST_SCORE, MUTATIONS, ROOT, Mutation, caught


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_fault_can_be_planted(mutation):
    text = (ROOT / mutation.file).read_text("utf-8")
    assert mutation.planted(text) != text


@pytest.mark.parametrize("test", sorted({mutation.test for mutation in MUTATIONS}))
def test_named_test_is_there(test):
    file, _, name = test.partition("::")
    assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text("utf-8")


def test_names_are_unique():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)


def test_text_that_is_gone_is_refused():
    with pytest.raises(ValueError, match="0 times"):
        MUTATIONS[0].planted("")


def test_runner_tells_caught_from_survived():
    fault = next(mutation for mutation in MUTATIONS if mutation.test.endswith("[case_softcap]"))
    harmless = Mutation("harmless", HOST_SCORE, fault.old, f"{fault.old}  # the cap", fault.test)
    assert fault.file == HOST_SCORE
    assert fault.test.startswith(HOST_CASE)
    assert dict(caught([harmless, fault])) == {harmless: False, fault: True}
