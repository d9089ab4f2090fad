from tests.support import faults


def test_each_fault_applies_once_and_names_tests_that_exist() -> None:
    listed, known = faults.read(), faults.tests()
    assert [problem for fault in listed for problem in faults.problems(fault, known)] == []
    assert len({fault.name for fault in listed}) == len(listed) >= 40
