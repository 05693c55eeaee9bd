"""typesafe-sdk: System One. Run by ../test_decisions_sdk.py, in an environment that has the library."""

import json
import sys

from typesafe_sdk import Choice, Image, Noul, RetryPolicy, Score, TypeSafeClient, TypeSafeError

url, key = sys.argv[1:]
TEAMS = {"billing": None, "support": "Other help"}
PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63f8ffff3f0005fe02fe0dc44eb4"
    "0000000049454e44ae426082"
)


def client(key=key):
    return TypeSafeClient(api_key=key, base_url=url, model="m", retry=RetryPolicy(max_retries=0))


def raised(ask):
    try:
        ask()
    except TypeSafeError as error:
        return error
    return None


def name(error):
    return type(error).__name__


with client() as made:
    answer = made.system_one(
        state={"message": "Charged twice"},
        questions={
            "refund": Noul(instructions="Refund?", criteria={"true": "asks money back"}),
            "team": Choice(criteria=TEAMS),
            "urgency": Score(criteria=["Routine", {"level": "Urgent"}]),
        },
    )
    many = Choice(criteria=dict.fromkeys(map(str, range(200))))
    refused = raised(lambda: made.system_one(state="x", questions={"q": many}))
    images = raised(lambda: made.system_one(state={"photo": Image(PIXEL)}, questions={"q": Noul(instructions="?")}))
    failed = raised(lambda: made.system_one(state="BREAK", questions={"q": Noul(instructions="?")}))
with client("wrong") as other:
    denied = raised(lambda: other.system_one(state="x", questions={"q": Noul(instructions="?")}))

says = {
    "answers": {question: name(found) for question, found in answer.answers.items()},
    "sum": sum(answer.choices["team"].probabilities.values()),
    "legend": [level for _, level in sorted(answer.scores["urgency"].legend.items())],
    "usage": [answer.usage.input_tokens, answer.usage.output_tokens],
    "refused": name(refused),
    "images": name(images),
    "denied": name(denied),
    "failed": name(failed),
    "failed_id": failed.headers["x-typesafe-request-id"],
}
print(json.dumps(says))
