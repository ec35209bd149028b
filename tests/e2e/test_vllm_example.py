"""vLLM's documented offline example runs with only the import changed."""

from __future__ import annotations

from unittest import mock

import pytest
from engine.variants import shared_tiny, variant

from jaxinfer import LLM

# docs.vllm.ai, "Offline Inference", basic example; `from vllm import ...` is the one line that differs.
EXAMPLE = """
from jaxinfer import LLM, SamplingParams

# Sample prompts.
prompts = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
# Create a sampling params object.
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)


def main():
    # Create an LLM.
    llm = LLM(model=MODEL)
    # Generate texts from the prompts.
    # The output is a list of RequestOutput objects
    # that contain the prompt, generated text, and other information.
    outputs = llm.generate(prompts, sampling_params)
    # Print the outputs.
    print("\\nGenerated Outputs:\\n" + "-" * 60)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt:    {prompt!r}")
        print(f"Output:    {generated_text!r}")
        print("-" * 60)


main()
"""


def assert_printed(text: str) -> None:
    lines = text.splitlines()
    assert [line.removeprefix("Prompt:    ") for line in lines if line.startswith("Prompt:")] == [
        "'Hello, my name is'",
        "'The president of the United States is'",
        "'The capital of France is'",
        "'The future of AI is'",
    ]
    answers = [line.removeprefix("Output:    ") for line in lines if line.startswith("Output:")]
    assert len(answers) == 4
    assert all(len(answer) > 2 for answer in answers)


def test_the_example_prints_four_answers(capsys: pytest.CaptureFixture[str]):
    with mock.patch("jaxinfer.engine.llm.load_engine", return_value=variant(shared_tiny())):
        exec(EXAMPLE, {"MODEL": "facebook/opt-125m"})
    assert_printed(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.weights
def test_the_example_prints_four_answers_of_the_real_model(real: LLM, capsys: pytest.CaptureFixture[str]):
    with mock.patch("jaxinfer.engine.llm.load_engine", return_value=variant(real.loaded)):
        exec(EXAMPLE, {"MODEL": "builtin"})
    assert_printed(capsys.readouterr().out)
