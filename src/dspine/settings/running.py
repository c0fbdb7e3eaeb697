"""Options about the model, the speed and the library: for whatever loads a model."""

from __future__ import annotations

from dspine.settings.setting import Setting, Variant

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
ANSWERING = ("run", "chat")
HOLDING_AN_ENGINE = (*ANSWERING, "serve")
MEASURING = ("bench", "eval")
EVERY_LOADING_COMMAND = (*HOLDING_AN_ENGINE, "doctor", *MEASURING)
TRAIN_COMMANDS = (
    *("train prompts", "train answers", "train features", "train ngram", "train fit"),
    "train eval",
)

RUN_SETTINGS: tuple[Setting, ...] = (
    Setting(
        name="model",
        flags=("-m", "--model"),
        kind="path",
        default=None,
        default_text="the default target",
        group="Model",
        help="Target: a GGUF file that llama.cpp runs.",
        commands=(
            *(*EVERY_LOADING_COMMAND, "convert", "export", "tokenizer export"),
            *TRAIN_COMMANDS,
        ),
        variants={
            command: Variant(
                "Target of the drafter, a GGUF file. A folder that `dspine train fit` wrote "
                "carries what is needed of it and is only compared; for any other it is required.",
                "",
            )
            for command in ("convert", "export")
        },
        placeholder="FILE",
    ),
    Setting(
        name="model_draft",
        flags=("-md", "--model-draft", "--spec-draft-model"),
        kind="path",
        default=None,
        default_text="the shipped drafter, with the default target",
        group="Model",
        help="Drafter: a DSpine GGUF made for that target.",
        commands=EVERY_LOADING_COMMAND,
        placeholder="FILE",
    ),
    Setting(
        name="hf_repo",
        flags=("-hf", "-hfr", "--hf-repo"),
        kind="text",
        default=None,
        group="Model",
        help="Target from the Hugging Face hub, instead of -m; without QUANT it is Q4_K_M, else "
        "Q8_0, else the first GGUF there.",
        commands=(*EVERY_LOADING_COMMAND, "tokenizer export"),
        placeholder="USER/REPO[:QUANT]",
    ),
    Setting(
        name="hf_file",
        flags=("-hff", "--hf-file"),
        kind="text",
        default=None,
        default_text="chosen by QUANT",
        group="Model",
        help="The file in the repository of -hf.",
        commands=(*EVERY_LOADING_COMMAND, "tokenizer export"),
        placeholder="FILE",
    ),
    Setting(
        name="hf_repo_draft",
        flags=("-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf"),
        kind="text",
        default=None,
        group="Model",
        help="Drafter from the Hugging Face hub, instead of -md; files with dspine in their name "
        "come first.",
        commands=EVERY_LOADING_COMMAND,
        placeholder="USER/REPO[:QUANT]",
    ),
    Setting(
        name="n_gpu_layers",
        flags=("-ngl", "--n-gpu-layers"),
        kind="int",
        default=0,
        least=-1,
        group="Model",
        help="Target layers kept on the graphics card; -1 is all of them.",
        commands=EVERY_LOADING_COMMAND,
        placeholder="N",
    ),
    Setting(
        name="ctx_size",
        flags=("-c", "--ctx-size"),
        kind="int",
        default=0,
        least=0,
        default_text="the model's, at most 4096",
        group="Model",
        help="Context window in tokens: the prompt and the answer together; 0 is the default.",
        commands=EVERY_LOADING_COMMAND,
        placeholder="N",
    ),
    Setting(
        name="cache_type_k",
        flags=("-ctk", "--cache-type-k"),
        kind="choice",
        default="f16",
        choices=CACHE_TYPES,
        group="Model",
        help="Number format of the cached keys.",
        commands=EVERY_LOADING_COMMAND,
    ),
    Setting(
        name="cache_type_v",
        flags=("-ctv", "--cache-type-v"),
        kind="choice",
        default="f16",
        choices=CACHE_TYPES,
        group="Model",
        help="Number format of the cached values; below f16 it needs flash attention.",
        commands=EVERY_LOADING_COMMAND,
    ),
    Setting(
        name="swa_full",
        flags=("--swa-full",),
        kind="switch",
        default=False,
        group="Model",
        help="Keep all positions of sliding-window layers, not only those in the window.",
        commands=HOLDING_AN_ENGINE,
    ),
    Setting(
        name="threads",
        flags=("-t", "--threads"),
        kind="int",
        default=0,
        least=0,
        default_text="one for each physical core, or fewer where that is faster (training: one "
        "for each)",
        group="Speed",
        help="Processor threads; 0 is the default.",
        commands=(
            *EVERY_LOADING_COMMAND,
            "quantize",
            "train prompts",
            "train answers",
            "train features",
            "train fit",
            "train eval",
        ),
        placeholder="N",
    ),
    Setting(
        name="batch_size",
        flags=("-b", "--batch-size"),
        kind="int",
        default=512,
        least=1,
        group="Speed",
        help="Prompt tokens that are processed at once.",
        commands=EVERY_LOADING_COMMAND,
        placeholder="N",
    ),
    Setting(
        name="flash_attn",
        flags=("-fa", "--flash-attn"),
        kind="choice",
        default="auto",
        choices=("auto", "on", "off"),
        group="Speed",
        help="Flash attention; auto takes the setting that was measured to be faster.",
        commands=EVERY_LOADING_COMMAND,
    ),
    Setting(
        name="proposer",
        flags=("--proposer",),
        kind="choice",
        default="auto",
        choices=("auto", "drafter", "dspine", "ngram", "none"),
        group="Speed",
        help="Where drafts come from: the drafter, of whatever kind (dspine means the same), "
        "repeated text in the context (ngram), or auto: ngram where a long match exists, else the "
        "drafter.",
        commands=HOLDING_AN_ENGINE,
    ),
    Setting(
        name="spec_draft_n_max",
        flags=("--spec-draft-n-max",),
        kind="int",
        default=0,
        least=0,
        default_text="as many as pay, decided at each step",
        group="Speed",
        help="Tokens drafted for each step, whether they pay or not: the block width less one; "
        "0 is the default.",
        commands=HOLDING_AN_ENGINE,
        placeholder="N",
    ),
    Setting(
        name="rollback",
        flags=("--rollback",),
        kind="choice",
        default="auto",
        choices=("auto", "trim", "snapshots", "checkpoint"),
        group="Speed",
        help="How rejected drafts leave the target's memory: trim cuts the cache; checkpoint "
        "copies the state of recurrent layers before a block, snapshots after each of its "
        "tokens. auto takes trim; for targets with recurrent layers snapshots where they take "
        "little of the free memory, else checkpoint.",
        commands=HOLDING_AN_ENGINE,
    ),
    Setting(
        name="ngram_min_match",
        flags=("--ngram-min-match",),
        kind="int",
        default=2,
        least=1,
        group="Speed",
        help="Shortest repeat, in tokens, that the ngram proposer continues.",
        commands=HOLDING_AN_ENGINE,
        placeholder="N",
    ),
    Setting(
        name="ngram_table",
        flags=("--ngram-table",),
        kind="path",
        default=None,
        default_text="the one beside the drafter, if there is one",
        group="Speed",
        help="Table of likely next tokens for the ngram proposer (`dspine train ngram`).",
        commands=HOLDING_AN_ENGINE,
        placeholder="FILE",
    ),
    Setting(
        name="plain",
        flags=("--plain",),
        kind="switch",
        default=False,
        group="Speed",
        help="Decode without any drafts.",
        commands=HOLDING_AN_ENGINE,
    ),
)

LIBRARY_SETTINGS: tuple[Setting, ...] = (
    Setting(
        name="library",
        flags=("--library",),
        kind="path",
        default=None,
        default_text="the one of llama-cpp-python",
        group="Library",
        help="Folder with the llama.cpp libraries (libllama and libggml) of the same version.",
        commands=(
            *EVERY_LOADING_COMMAND,
            *("quantize", "train prompts", "train answers", "train features"),
        ),
        placeholder="FOLDER",
    ),
    Setting(
        name="cache_dir",
        flags=("--cache-dir",),
        kind="path",
        default=None,
        default_text="dspine in $XDG_CACHE_HOME, else in ~/.cache",
        group="Library",
        help="Where measurements of this machine are kept.",
        commands=EVERY_LOADING_COMMAND,
        placeholder="FOLDER",
    ),
    Setting(
        name="no_calibrate",
        flags=("--no-calibrate",),
        kind="switch",
        default=False,
        group="Library",
        help="Do not measure this machine: draft at the drafter's full width.",
        commands=HOLDING_AN_ENGINE,
    ),
    Setting(
        name="no_probe",
        flags=("--no-probe",),
        kind="switch",
        default=False,
        group="Library",
        help="Do not test the library in a child process first.",
        commands=HOLDING_AN_ENGINE,
    ),
)
