import numpy as np

from varuna.integrations.transformers.main_rank import pack, unpack


def test_predictions_come_back_as_they_were() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    value = (({"a": 1.5, "b": np.float64(2.0)}, [array, (array[0], None)]), "text", 3)
    (numbers, arrays), text, three = unpack(pack(value))
    assert numbers == {"a": 1.5, "b": 2.0}
    assert text == "text"
    assert three == 3
    assert np.array_equal(arrays[0], array)
    assert arrays[0].dtype == np.float32
    assert np.array_equal(arrays[1][0], array[0])
    assert arrays[1][1] is None
