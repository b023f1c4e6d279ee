import base64
import io
import json
import pickle
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from flowcorr.errors import BackendError, BatchError, ConfigError, MissingExtraError
from flowcorr.records import Prompt
from flowcorr.rewards import VlmJudge, score_batch
from flowcorr.rewards.references import references_of
from flowcorr.rewards.vlm_judge import last_value
from tests.prompts import prompts_of

IMAGES = (10 * np.arange(4, dtype=np.uint8))[:, None, None, None] * np.ones((4, 8, 8, 3), dtype=np.uint8)
PROMPTS = [
    Prompt(text=f'a sign that says "{word}"', target=word) for word in ("open", "shut", "Enter", "exit")
]


def completion(content, finish="stop"):
    return {"choices": [{"message": {"role": "assistant", "content": content}, "finish_reason": finish}]}


def place_of(request):
    """Which of the images a request shows; their pixels are 10 times their place."""
    url = request.json()["messages"][0]["content"][0]["image_url"]["url"]
    header, _, data = url.partition(",")
    assert header == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))[0, 0, 0] // 10


def answers(*contents):
    return lambda request: completion(contents[place_of(request)])


def question(request):
    return request.json()["messages"][0]["content"][1]["text"]


def judge(server, **options):
    return VlmJudge(
        **{"base_url": f"{server.url}/v1", "model": "vlm", "backoff": 0.001, "timeout": 300.0, **options}
    )


@pytest.mark.parametrize("concurrency", [1, 8])
def test_scores_are_mapped_onto_the_unit_interval(serve, concurrency):
    server = serve(
        answers('{"score": 0}', '{"score": 2.5}', '```json\n{"score": 5}\n```', 'Fine. {"score": 10}')
    )
    output = judge(server, concurrency=concurrency)(IMAGES, PROMPTS)
    assert output.scores.tolist() == [0.0, 0.25, 0.5, 1.0]
    assert not output.errors


def test_score_range_is_an_option(serve):
    server = serve(answers(*['{"score": 4}'] * 4))
    assert judge(server, score_range=[1, 5])(IMAGES, PROMPTS).scores.tolist() == [0.75] * 4
    assert "from 1 to 5" in question(server.requests[0])


def test_request_is_a_chat_completion_at_temperature_0(serve, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    server = serve(answers(*['{"score": 4}'] * 4))
    judge(server, api_key_env="JUDGE_KEY", max_tokens=99)(IMAGES[:1], PROMPTS[:1])
    (request,) = server.requests
    assert request.path == "/v1/chat/completions"
    assert request.headers["Authorization"] == "Bearer s3cret"
    body = request.json()
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("vlm", 0, 99)
    assert 'a sign that says "open"' in question(request)
    assert re.search(r"\{(prompt|low|high)\}", question(request)) is None


def test_reference_images_are_sent_before_the_image(serve):
    server, (edit,) = serve(lambda _: completion('{"score": 5}')), prompts_of(["make it red"], images=2)
    assert judge(server)(IMAGES[3:], [edit]).scores.tolist() == [0.5]
    *pictures, asked = server.requests[0].json()["messages"][0]["content"]
    shown = [
        np.asarray(Image.open(io.BytesIO(base64.b64decode(picture["image_url"]["url"].partition(",")[2]))))
        for picture in pictures
    ]
    (references,) = references_of([edit], *IMAGES.shape[1:3])
    np.testing.assert_array_equal(shown, [*references, IMAGES[3]])
    assert "The last image was made from the others" in asked["text"]


def test_a_transcriber_sees_no_reference(serve):
    server, edits = serve(lambda _: completion('{"text": "x"}')), prompts_of(['say "x"'], images=1)
    judge(server, mode="transcribe")(IMAGES[:1], [replace(edits[0], target="x")])
    assert len(server.requests[0].json()["messages"][0]["content"]) == 2


def test_transcription_is_compared_as_ocr_compares(serve):
    texts = ('{"text": "open"}', '{"text": "shot"}', '{"text": "EN TER!"}', '{"text": ""}')
    output = judge(serve(answers(*texts)), mode="transcribe")(IMAGES, PROMPTS)
    np.testing.assert_allclose(output.scores, [1, 3 / 4, 5 / 6, 0])
    assert tuple(output.extra) == VlmJudge.extras
    assert output.extra["exact_match"].tolist() == [1.0, 0.0, 0.0, 0.0]


def test_transcriber_is_not_told_what_to_read(serve):
    server = serve(answers(*['{"text": "x"}'] * 4))
    judge(server, mode="transcribe")(IMAGES, PROMPTS)
    assert all("says" not in question(request) for request in server.requests)


def test_own_template_takes_prompt_and_target_once(serve):
    server = serve(answers(*['{"score": 1}'] * 4))
    template = 'Shows {prompt} the word {target}? {"score": 0 or 10} {other}'
    prompt = Prompt(text="{target}", target="{prompt}")
    judge(server, template=template)(IMAGES[:1], [prompt])
    assert question(server.requests[0]) == 'Shows {target} the word {prompt}? {"score": 0 or 10} {other}'


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("I cannot say.", r"vlm .*'I cannot say\.', .*JSON object .*\"score\""),
        ("", 'JSON object .*"score"'),
        (None, 'JSON object .*"score"'),
        ('{"rating": 3}', 'JSON object .*"score"'),
        ('{"score": 3', 'JSON object .*"score"'),
        ('{"score": "high"}', '"score" is str'),
        ('{"score": true}', '"score" is bool'),
        ('{"score": null}', '"score" is NoneType'),
        ('{"score": 11}', r"score_range=\[0, 10\]"),
        ('{"score": NaN}', r"score_range=\[0, 10\]"),
    ],
    ids=str,
)
def test_unreadable_answer_fails_its_sample_alone_with_the_reason(serve, content, named, caplog):
    server = serve(answers('{"score": 1}', content, '{"score": 3}', '{"score": 4}'))
    with pytest.raises(BackendError, match=f'sample 1 .*"shut".*{named}'):
        score_batch(judge(server), IMAGES, PROMPTS)
    server.requests.clear()
    output = score_batch(judge(server), IMAGES, PROMPTS, on_error="drop_group")
    assert output.failed.tolist() == [False, True, False, False]
    np.testing.assert_allclose(output.scores, [0.1, np.nan, 0.3, 0.4])
    assert re.search(named, caplog.text)
    assert len(server.requests) == 4


@pytest.mark.parametrize("finish", ["length", "content_filter", "abort"])
def test_an_answer_that_is_cut_off_fails_its_sample_alone(serve, finish, caplog):
    server = serve(lambda _: completion('First I try {"score": 9}. But looking', finish))
    with pytest.raises(BackendError, match=rf"sample 0 .*\(finish_reason='{finish}'\)"):
        score_batch(judge(server), IMAGES, PROMPTS)
    whole = completion('{"score": 1}')
    server = serve(lambda request: completion('{"score": 9} or', finish) if place_of(request) == 2 else whole)
    output = score_batch(judge(server, max_tokens=64), IMAGES, PROMPTS, on_error="drop_group")
    assert output.failed.tolist() == [False, False, True, False]
    np.testing.assert_allclose(output.scores, [0.1, 0.1, np.nan, 0.1])
    assert ("raise max_tokens=64" in caplog.text) == (finish == "length")


@pytest.mark.parametrize("finish", ["stop", None, "eos_token", "STOP"])
def test_an_answer_that_its_model_ended_counts(serve, finish):
    server = serve(lambda _: completion('{"score": 4}', finish))
    assert judge(server)(IMAGES, PROMPTS).scores.tolist() == [0.4] * 4


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "text", "text": '{"score": 4}'}],
        [{"type": "text", "text": '{"score":'}, {"type": "text", "text": " 4}"}],
        [
            {"type": "thinking", "thinking": [{"type": "text", "text": "9"}]},
            {"type": "text", "text": '{"score": 4}'},
        ],
        ['{"score": 4}'],
    ],
)
def test_content_in_parts_is_read(serve, content):
    assert judge(serve(lambda _: completion(content)))(IMAGES, PROMPTS).scores.tolist() == [0.4] * 4


def test_unreadable_transcription_fails_its_sample(serve):
    server = serve(answers('{"text": "open"}', '{"text": 3}', '{"text": "enter"}', '{"text": "exit"}'))
    output = judge(server, mode="transcribe")(IMAGES, PROMPTS)
    np.testing.assert_array_equal(output.scores, [1, np.nan, 1, 1])
    np.testing.assert_array_equal(output.extra["exact_match"], [1, np.nan, 1, 1])
    assert list(output.errors) == [1]


@pytest.mark.parametrize("status", [400, 413, 422])
@pytest.mark.parametrize("mode", ["score", "transcribe"])
def test_refused_image_fails_its_sample_alone_with_the_reason(serve, status, mode, caplog):
    def filtered(request):
        if place_of(request) == 1:
            return status, b"content filter", {}
        return completion('{"score": 10, "text": "open"}')

    server = serve(filtered)
    reward = judge(server, mode=mode, retries=2)
    named = rf"sample 1 .*\"shut\".* status {status}: content filter"
    with pytest.raises(BackendError, match=named):
        score_batch(reward, IMAGES, PROMPTS)
    server.requests.clear()
    output = score_batch(reward, IMAGES, PROMPTS, on_error="drop_group")
    assert output.failed.tolist() == [False, True, False, False]
    assert np.isnan(output.scores).tolist() == output.failed.tolist()
    assert re.search(named, caplog.text)
    assert len(server.requests) == 4


@pytest.mark.parametrize("status", [401, 403, 404, 500])
def test_other_refusals_end_the_run(serve, status):
    server = serve(lambda request: (status, b"no", {}))
    with pytest.raises(BackendError, match=f"answered status {status}"):
        score_batch(judge(server, retries=0), IMAGES, PROMPTS, on_error="drop_group")


@pytest.mark.parametrize(
    "answer", [{}, [], {"choices": []}, {"choices": [{"text": "hi"}]}, {"error": "no such model"}], ids=str
)
def test_answer_that_is_no_completion(serve, answer):
    with pytest.raises(BackendError, match=f"completion: {re.escape(json.dumps(answer))}"):
        judge(serve(lambda request: answer))(IMAGES, PROMPTS)


def test_limited_rate_is_waited_for(serve):
    def limited(request):
        if len(server.requests) % 2:
            return 429, b"slow down", {"Retry-After": "0"}
        return completion('{"score": 10}')

    server = serve(limited)
    assert judge(server, concurrency=1)(IMAGES, PROMPTS).scores.tolist() == [1.0] * 4
    assert len(server.requests) == 8


def test_endpoint_that_times_out_ends_in_one_error(serve):
    server = serve(lambda request: server.stopping.wait(600) or {})
    with pytest.raises(BackendError, match=r"vlm_judge: .* timeout=0\.1 s"):
        score_batch(
            judge(server, timeout=0.1, retries=0, concurrency=2), IMAGES, PROMPTS, on_error="drop_group"
        )
    assert len(server.requests) <= 2


def test_missing_target_names_the_prompt(serve):
    server = serve(answers(*['{"text": "x"}'] * 4))
    for options in ({"mode": "transcribe"}, {"template": "Does it say {target}?"}):
        with pytest.raises(BatchError, match="vlm_judge: sample 0 .* target;"):
            judge(server, **options)(IMAGES[:1], [Prompt(text="a cat")])
    assert server.requests == []


def test_key_is_neither_stored_nor_shown(serve, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    server = serve(lambda request: (401, request.headers["Authorization"].encode(), {}))
    reward = pickle.loads(pickle.dumps(judge(server, api_key_env="JUDGE_KEY")))
    assert b"s3cret" not in pickle.dumps(reward)
    with pytest.raises(BackendError, match="token of JUDGE_KEY") as caught:
        reward(IMAGES, PROMPTS)
    assert "s3cret" not in f"{caught.value} {reward!r}"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"mode": "scores"}, r"mode='scores' .*score\?.* transcribe, score$"),
        ({"score_range": [5, 5]}, r"score_range=\[5, 5\]"),
        ({"score_range": 10}, "score_range=10"),
        ({"score_range": [0, "a"]}, r"score_range=\[0, 'a'\]"),
        ({"template": " "}, "template=' '"),
        ({"mode": "transcribe", "template": "Is it {target}?"}, r"template .*\{target\}"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"concurrency": 0}, "concurrency=0"),
        ({"model": None}, "model=<NoneType>"),
        ({"api_key_env": 5}, "api_key_env=5"),
        ({"base_url": "localhost"}, "url must"),
        ({"api_key_env": "NOT_SET_ANYWHERE"}, "variable 'NOT_SET_ANYWHERE'"),
    ],
    ids=str,
)
def test_bad_options_are_refused(options, named):
    with pytest.raises(ConfigError, match=f"^reward vlm_judge: .*{named}"):
        VlmJudge(**{"base_url": "http://localhost/v1", "model": "vlm", **options})


def test_missing_package_is_said_at_construction(monkeypatch):
    monkeypatch.setitem(sys.modules, "rapidfuzz", None)
    VlmJudge(base_url="http://localhost/v1", model="vlm")
    with pytest.raises(MissingExtraError, match=r"pip install 'flowcorr\[ocr\]'"):
        VlmJudge(base_url="http://localhost/v1", model="vlm", mode="transcribe")


def test_last_object_with_the_key_counts():
    text = '<think>{"score": 1} or {{"a": {"score": 9}}</think> {"score": 2, "why": "}{"} {"note": 1} {'
    assert last_value(text, "score", (int, float)) == 2


@pytest.mark.parametrize(
    ("text", "mark"),
    [
        ('<think>The example was {"score": 10}. The text is wrong, so', "<think>"),
        ('Well. <think>{"score": 9}', "<think>"),
        ("<THINKING>perhaps", "<THINKING>"),
        ("[THINK]so {", "[THINK]"),
        ('◁think▷{"score": 9} or', "◁think▷"),
        ('<think>a</think> {"score": 3} <think>b {"score": 4}', "<think>"),
        ('<think>{"score": {"a": "', "<think>"),
    ],
)
def test_a_draft_in_thoughts_that_do_not_end_is_no_score(text, mark):
    with pytest.raises(ValueError, match=f" {re.escape(mark)} .* max_tokens$"):
        last_value(text, "score", (int, float))


@pytest.mark.parametrize(
    "text",
    [
        '<think>{"score": 1}</think> no',
        'so {"score": 1}</think>',
        '{"score": 1}[/THINK]',
        pytest.param('{"score": 1}' + " " * 100_000, id="far before the end"),
    ],
)
def test_a_draft_in_thoughts_that_end_or_far_before_the_end_is_no_score(text):
    with pytest.raises(ValueError, match='JSON object .*"score"'):
        last_value(text, "score", (int, float))


@pytest.mark.parametrize("mark", ["<think>", "</think>", "[THINK]"])
def test_a_picture_may_show_a_mark_of_thoughts(mark):
    assert last_value(f'<think>hm {{}}</think>{{"text": "{mark}"}}', "text", str) == mark


def test_line_breaks_within_a_transcription_are_read():
    """Models write them as they see them, and not as JSON asks."""
    assert last_value('{"text": "OPEN\n24 h\t", "lines": 2}', "text", str) == "OPEN\n24 h\t"


@pytest.mark.parametrize("piece", ["{", '{"', '{"a":', "[", '{"a":[', '{"a":1,', '{"\\"', "{ "])
def test_no_text_takes_long_to_read(piece, monkeypatch):
    """No character is looked at twice, whatever the text is made of; an error counts the lines before it."""
    seen = []

    class Counting(json.JSONDecoder):
        def raw_decode(self, text, place=0):
            try:
                return super().raw_decode(text, place)
            except (ValueError, RecursionError) as error:
                seen.append(getattr(error, "pos", len(text)))
                raise

    monkeypatch.setattr(json, "JSONDecoder", Counting)
    text = piece * (60_000 // len(piece))
    with pytest.raises(ValueError, match='JSON object .*"score"'):
        last_value(text, "score", int)
    assert sum(seen) <= len(text)


def test_the_end_of_a_long_answer_is_read():
    assert last_value('{"score": 1}' + " " * 100_000 + '{"score": 2}' + " " * 60_000, "score", int) == 2


@pytest.mark.parametrize(
    "text", ['{"a": 1, b: {"score": 2}}', '{{"score": 2}', '{ {"score": 2} }', '{"score": 2}{"']
)
def test_an_object_after_one_that_breaks_off_counts(text):
    assert last_value(text, "score", int) == 2
