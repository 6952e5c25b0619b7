"""One request to a library alone, in an interpreter that has imported nothing before.

    python -m benchmarks.bare CAPABILITY

What one would write without this system: import, load, ask once. It prints the answer, the
seconds since its process began, and those of the answer alone. Models, their arguments and requests
are those of serve_config.yaml and benchmarks.calls, handed over in a file, so that no import of
this repository's weighs on the library.
"""

import base64
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

SAID = "bare: "  # begins the one line that is read; libraries print lines of their own
LONGEST_S = 300.0
_LOADED_S: list[float] = []  # when the model was there


def loaded() -> None:
    """Called between load and request."""
    _LOADED_S.append(time.perf_counter())


@dataclass(frozen=True, slots=True)
class Measured:
    """What a fresh interpreter answered."""

    answer: str
    seconds: float  # since its process began
    answer_s: float  # from the loaded model to its answer


@dataclass(frozen=True, slots=True)
class Task:
    """A model and a request for it."""

    capability: str
    model: str  # its folder
    engine_args: dict[str, Any]
    fields: dict[str, Any]  # of the request
    file: str | None  # of a form

    @property
    def sampling(self) -> dict[str, Any]:
        return {k: v for k, v in self.fields.items() if k != "messages"}


# -------------------------------------------------------------------------------------------------
# The libraries. Each returns what it answered.


def vllm(task: Task) -> Any:
    """`enforce_eager`, as our engines on a CPU: without it the start is longer still."""
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in fields(EngineArgs)}  # the rest is for its HTTP server
    args = {name: value for name, value in task.engine_args.items() if name in known}
    model = LLM(task.model, enforce_eager=True, **args)
    loaded()
    return model


def chat(task: Task) -> str:
    """Of text and of pictures."""
    model = vllm(task)
    from vllm import SamplingParams

    sampling = SamplingParams(**task.sampling)
    return str(model.chat(task.fields["messages"], sampling, use_tqdm=False)[0].outputs[0].text)


def rerank(task: Task) -> str:
    query, documents = task.fields["query"], task.fields["documents"]
    scored = vllm(task).score(query, documents, use_tqdm=False)
    return str([round(one.outputs.score, 3) for one in scored])


def embedding(task: Task) -> str:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(task.model, local_files_only=True)
    loaded()
    return str(model.encode([task.fields["input"]])[0][:3])


def asr(task: Task) -> str:
    from faster_whisper import WhisperModel

    assert task.file
    model = WhisperModel(task.model, device="cpu", compute_type="int8", local_files_only=True)
    loaded()
    segments, _ = model.transcribe(task.file, language=task.fields["language"])
    return "".join(segment.text for segment in segments)


def tts(task: Task) -> str:
    """As Piper does: espeak's phonemes, each followed by a pad, through onnxruntime."""
    import numpy as np
    import onnxruntime

    from deployments.engines.audio.espeak import Espeak

    [file] = Path(task.model).glob("*.onnx")
    voice = json.loads(file.with_suffix(".onnx.json").read_text())
    options = onnxruntime.SessionOptions()
    options.enable_mem_reuse = False  # as our engine: by default this graph opens in 4-5 s, not 1
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    espeak, known = Espeak(), voice["phoneme_id_map"]
    espeak.choose(voice["espeak"]["voice"])
    loaded()
    said = [c for c in espeak.phonemes(task.fields["input"]) if c in known]
    ids = [i for c in ("^", *said) for i in (*known[c], *known["_"])] + known["$"]
    usual = voice["inference"]
    scales = [usual["noise_scale"], usual["length_scale"], usual["noise_w"]]
    given = {
        "input": np.array([ids], np.int64),
        "input_lengths": np.array([len(ids)], np.int64),
        "scales": np.array(scales, np.float32),
    }
    samples = session.run(None, given)[0].size
    return f"{samples / voice['audio']['sample_rate']:.2f} s of sound"


def vad(task: Task) -> str:
    """The package's TorchScript, of which our weights are."""
    import wave

    import torch
    from silero_vad import get_speech_timestamps, load_silero_vad

    assert task.file
    model = load_silero_vad()
    loaded()
    with wave.open(task.file) as heard:
        raw, rate_hz = bytearray(heard.readframes(heard.getnframes())), heard.getframerate()
    samples = torch.frombuffer(raw, dtype=torch.int16) / 32_768.0
    return str(get_speech_timestamps(samples, model, sampling_rate=rate_hz))


def image(task: Task) -> str:
    import torch
    from diffusers import AutoPipelineForText2Image

    args = task.engine_args
    pipe = AutoPipelineForText2Image.from_pretrained(
        task.model, dtype=torch.float32, use_safetensors=True, local_files_only=True
    )
    pipe.set_progress_bar_config(disable=True)
    loaded()
    made = pipe(
        task.fields["prompt"],
        num_inference_steps=args["steps"],
        guidance_scale=args["guidance"],
        generator=torch.Generator().manual_seed(task.fields["x_seed"]),
    ).images[0]
    file = io.BytesIO()
    made.save(file, "PNG")
    return f"{len(base64.b64encode(file.getvalue()))} characters of PNG"


LIBRARIES: dict[str, Callable[[Task], str]] = {
    "chat": chat,
    "embedding": embedding,
    "rerank": rerank,
    "vision": chat,
    "asr": asr,
    "tts": tts,
    "vad": vad,
    "image": image,
}

# -------------------------------------------------------------------------------------------------
# The interpreter around them.


def process_age_s() -> float:
    """Seconds since this process began, its interpreter's start included (proc(5), starttime)."""
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    began_s = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began_s


def measured(task: Task) -> Measured:
    """Raises RuntimeError."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(asdict(task), file)
        file.flush()
        command = [sys.executable, "-m", "benchmarks.bare", task.capability, "--task", file.name]
        env = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=LONGEST_S, check=False
        )
    for line in done.stdout.splitlines():
        if line.startswith(SAID):
            return Measured(**json.loads(line.removeprefix(SAID)))
    raise RuntimeError(f"{task.capability}, status {done.returncode}: {done.stderr[-1000:]}")


def by_itself(capability: str) -> Measured:
    """With no graph: espeak-ng reads the sentence that is heard."""
    from benchmarks import calls
    from benchmarks.first_token import shipped, table_of
    from deployments.engines.audio import sound
    from deployments.engines.audio.espeak import Espeak
    from tests.support.speech import wav

    espeak = Espeak()
    espeak.choose("en-us")
    said = wav(espeak.speak(calls.SENTENCE, 1.0), espeak.rate_hz)
    heard = wav(sound.floats(sound.decode(said, most_s=60)), sound.HEARD_HZ)
    with tempfile.TemporaryDirectory() as folder:
        call = calls.calls(heard)[capability]
        return measured(task_of(table_of(shipped(0, 0)), capability, call, Path(folder)))


def task_of(table: dict[str, Any], capability: str, call: Any, folder: Path) -> Task:
    """Of a benchmarks.calls.Call for the first model of a capability; its file goes to `folder`."""
    from deployments.config import load_plan
    from deployments.config.schema import parse_table

    config = parse_table(table, "serve_config.yaml").capabilities[capability]
    plan = load_plan.plan(next(iter(config.models)), config).config
    file = None
    if call.file is not None:
        file = folder / "heard.wav"
        file.write_bytes(call.file)
    heard = str(file) if file else None
    return Task(capability, plan["model"], plan["engine_args"], dict(call.fields), heard)


def main() -> None:
    capability, *rest = sys.argv[1:]
    if rest:
        task = Task(**json.loads(Path(rest[1]).read_text()))
        said = LIBRARIES[capability](task)
        measured = Measured(said, process_age_s(), time.perf_counter() - _LOADED_S[-1])
        print(f"\n{SAID}{json.dumps(asdict(measured))}", flush=True)
        return
    alone = by_itself(capability)
    print(f"{capability}: {alone.answer}")
    print(f"{alone.seconds:.2f} s, of them {alone.answer_s:.2f} s for the answer alone")


if __name__ == "__main__":
    main()
