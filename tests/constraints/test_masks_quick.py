from tests.constraints.driving import *
import json
def test_quick():
    s={"type":"object","properties":{"a":{"type":"string"},"b":{"type":"integer"}},"required":["a"],"additionalProperties":False}
    assert is_answer(json_mask(s), '{"a":"x","b":12}')
    assert is_answer(json_mask(s), '{ "a" : "x" }')
    assert not is_answer(json_mask(s), '{"b":1}')
    r=Random(1)
    for i in range(20):
        t=wander(json_mask(s), r); print(t)
        if t is not None: json.loads(t)
