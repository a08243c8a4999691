"""draftwire.v1.ModelService: the model, its limits and its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping

from service.admission import Admission
from service.chat import ChatError
from service.checks import (
    MAX_DETOKENIZE_IDS,
    Limits,
    Violations,
    check_ids,
    check_messages,
    check_text,
)
from service.handlers import Behaviour, Context
from service.pb import draftwire_pb2 as pb
from service.status import invalid


class ModelService:
    """The three methods, as behaviours for `Calls`."""

    def __init__(self, admission: Admission, limits: Limits, wire_limits: pb.Limits) -> None:
        self._admission = admission
        self._limits = limits
        self._wire_limits = wire_limits

    @property
    def behaviours(self) -> Mapping[str, Behaviour]:
        return {
            "GetModelInfo": self.get_model_info,
            "Tokenize": self.tokenize,
            "Detokenize": self.detokenize,
        }

    async def get_model_info(
        self, _: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        model = self._admission.ready_model()
        info = model.info
        return pb.GetModelInfoResponse(
            model=info.model,
            architecture=info.architecture,
            context_limit=info.context_limit,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_ids,
            dtype=info.dtype,
            device=info.device,
            draft_sources=info.draft_sources,
            max_draft_tokens=info.max_draft_tokens,
            kv_capacity_tokens=info.kv_capacity_tokens,
            chat=model.codec.chat,
            fingerprint=info.fingerprint,
            strict=info.strict,
            not_strict_because=info.not_strict_because,
            kv_dtype=info.kv_dtype,
            weights=info.weights,
            limits=self._wire_limits,
        )

    async def tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        codec = self._admission.ready_model().codec
        found = Violations("")
        kind = request.WhichOneof("prompt")
        found.need(kind is not None, "prompt", "one of text and messages is required")
        found.refuse_if_any()
        if kind == "text":
            check_text(request.text, "text", self._limits, found)
            found.refuse_if_any()
            return pb.TokenizeResponse(token_ids=await codec.encode(request.text))
        chat = check_messages(request.messages, self._limits, codec.chat, found)
        found.refuse_if_any()
        try:
            return pb.TokenizeResponse(token_ids=await codec.encode_chat(chat.messages))
        except ChatError as error:
            raise invalid([("messages", str(error))]) from error

    async def detokenize(
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        model = self._admission.ready_model()
        found = Violations("")
        count = len(request.token_ids)
        found.need(
            count <= MAX_DETOKENIZE_IDS,
            "token_ids",
            f"{count} ids are over the limit of {MAX_DETOKENIZE_IDS}",
        )
        found.refuse_if_any()
        ids = list(request.token_ids)
        check_ids(ids, "token_ids", model.info, found)
        found.refuse_if_any()
        text = await model.codec.decode(ids, request.keep_special_tokens)
        return pb.DetokenizeResponse(text=text)
