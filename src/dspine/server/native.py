"""llama-server's own routes: health, props, slots, metrics, tokens and templates."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from dspine.server.answers import now
from dspine.server.app import service
from dspine.server.bodies import ApplyTemplateBody, DetokenizeBody, TokenizeBody
from dspine.server.completions import read_body
from dspine.server.errors import RequestError, error_response
from dspine.server.metrics import CONTENT_TYPE
from dspine.server.requests import message_of, template_variables


async def health(request: Request) -> Response:
    """200 when answers can be made, 503 with the reason before and after."""
    thread = service(request).thread
    if thread.state == "ready":
        return JSONResponse({"status": "ok"})
    stage = {"stage": thread.stage} if thread.state == "loading" and thread.stage else {}
    return error_response(503, thread.reason, None, **stage)


async def models(request: Request) -> Response:
    """The one model that is served."""
    return JSONResponse({"object": "list", "data": [_model(request)]})


async def model(request: Request) -> Response:
    """It by its name, as OpenAI's clients look it up."""
    entry = _model(request)
    if request.path_params["name"] != entry["id"]:
        raise RequestError(404, f"there is one model here, {entry['id']}", "model")
    return JSONResponse(entry)


def _model(request: Request) -> dict[str, Any]:
    made = service(request)
    meta: dict[str, Any] | None = None
    if made.thread.state == "ready":
        engine = made.thread.engine
        meta = {"n_vocab": engine.tokenizer.vocab_size, "n_ctx": engine.n_ctx}
        if (facts := engine.target_facts) is not None:
            meta |= {
                "n_ctx_train": facts.context_train,
                "n_embd": facts.hidden_size,
                "n_params": facts.num_parameters,
                "size": facts.size_bytes,
            }
    return {
        "id": made.options.alias,
        "object": "model",
        "created": int(made.started),
        "owned_by": "dspine",
        "meta": meta,
    }


async def props(request: Request) -> Response:
    """Facts of the server: template, context, who drafts."""
    made = service(request)
    engine = made.thread.engine
    return JSONResponse(
        {
            "model_alias": made.options.alias,
            "model_path": engine.model_path.name,
            "total_slots": engine.slots,
            "chat_template": made.defaults.template,
            "build_info": f"dspine {version('dspine')}",
            "modalities": {"vision": False, "audio": False},
            "default_generation_settings": {
                "n_ctx": engine.n_ctx,
                "params": {
                    "temperature": made.defaults.sampling.temperature,
                    "top_k": made.defaults.sampling.top_k,
                    "top_p": made.defaults.sampling.top_p,
                    "min_p": made.defaults.sampling.min_p,
                    "n_predict": made.defaults.max_tokens or -1,
                },
            },
            "speculative": {
                "proposer": engine.proposer,
                "drafter": None if engine.drafter_path is None else engine.drafter_path.name,
                "drafting_off": engine.disabled_reason,
            },
        }
    )


async def slots(request: Request) -> Response:
    """What each slot does; never what is said in it. 503 with `?fail_on_no_slot=1` when none is
    free, for those who spread requests over several servers.
    """
    made = service(request)
    engine = made.thread.engine
    facts = made.thread.slots
    if request.query_params.get("fail_on_no_slot") and all(one.state != "idle" for one in facts):
        return error_response(503, "no slot is free")
    return JSONResponse(
        [
            {
                "id": slot.id,
                "n_ctx": slot.n_ctx,
                "is_processing": slot.state != "idle",
                "state": slot.state,
                "n_prompt_tokens": slot.prompt_tokens,
                "n_decoded": slot.decoded_tokens,
                "n_held": slot.held_tokens,
                "n_waiting": made.thread.n_waiting,
                "speculative": engine.proposer != "none",
            }
            for slot in facts
        ]
    )


async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    made = service(request)
    thread = made.thread
    text = made.metrics.text(thread.n_running, thread.n_waiting, thread.decodes)
    return Response(text, media_type=CONTENT_TYPE)


async def tokenize(request: Request) -> Response:
    """Token ids of a text."""
    tokenizer = service(request).thread.engine.tokenizer
    body = await read_body(request, TokenizeBody)
    tokens = await run_in_threadpool(
        tokenizer.encode,
        body.content,
        add_special=body.add_special,
        parse_special=body.parse_special,
    )
    if not body.with_pieces:
        return JSONResponse({"tokens": tokens})
    return JSONResponse(
        {"tokens": [{"id": t, "piece": _piece(tokenizer.piece(t, special=True))} for t in tokens]}
    )


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    tokenizer = service(request).thread.engine.tokenizer
    body = await read_body(request, DetokenizeBody)
    wrong = next((t for t in body.tokens if t >= tokenizer.vocab_size), None)
    if wrong is not None:
        raise RequestError(
            400,
            f"token {wrong} is outside the vocabulary of {tokenizer.vocab_size}: send ids that "
            "/tokenize gave",
            "tokens",
        )
    text = b"".join(tokenizer.piece(token, special=True) for token in body.tokens)
    return JSONResponse({"content": text.decode("utf-8", "replace")})


async def apply_template(request: Request) -> Response:
    """The prompt that messages become."""
    engine = service(request).thread.engine
    body = await read_body(request, ApplyTemplateBody)
    variables = template_variables(body.chat_template_kwargs)
    if body.tools:
        variables["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools]
    messages = [message_of(message, i) for i, message in enumerate(body.messages)]
    prompt = await run_in_threadpool(engine.prompt_text, messages, variables)
    return JSONResponse({"prompt": prompt, "created": now()})


def _piece(raw: bytes) -> str | list[int]:
    """Text, or the bytes of a part of a character, as llama-server gives them."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return list(raw)
