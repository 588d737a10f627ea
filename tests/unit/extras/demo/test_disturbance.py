from varuna.extras.demo.run import Act, Disturbance


def test_acts_come_in_order_and_wait_for_the_morph_before() -> None:
    disturbance = Disturbance(steps=70)
    assert disturbance.after(9, morphs_done=0) is None
    assert disturbance.after(10, morphs_done=0) is Act.KILL_LAST
    assert disturbance.after(20, morphs_done=0) is None
    assert disturbance.after(21, morphs_done=1) is Act.KILL_FIRST
    assert disturbance.after(25, morphs_done=1) is None
    assert disturbance.after(26, morphs_done=2) is Act.RETURN
    assert disturbance.after(59, morphs_done=3) is None


def test_no_act_is_played_twice() -> None:
    disturbance = Disturbance(steps=70)
    assert disturbance.after(10, morphs_done=0) is Act.KILL_LAST
    assert disturbance.after(10, morphs_done=0) is None
