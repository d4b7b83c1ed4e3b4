"""The engine's error tree.

    EngineError                    code
    ├── InvalidRequest             invalid_request          can never run as asked (names `param`)
    │   ├── ContextLengthExceeded  context_length_exceeded
    │   └── GrammarExhausted       grammar_exhausted        it outgrew its limits amid the output
    ├── EngineOverloaded           engine_overloaded        the lane's bounded queue is full
    ├── DeadlineExceeded           deadline_exceeded        not begun before its deadline
    ├── TakenBack                  taken_back               its gateway wanted it back, not begun
    ├── EngineUnavailable          engine_unavailable       nobody at the other end of the socket
    ├── EngineStepFailed           engine_step_failed       a step with this one raised
    ├── ConfigError                config_error             the engine cannot start as configured
    │   └── UnsupportedModel       unsupported_model        the registry does not know it
    └── ProtocolError              protocol_error           a frame too large, cut or undecodable

Messages are written for the person who reads the log; clients of the gateway see constant texts
chosen by `code`.
"""

from __future__ import annotations

from typing import ClassVar

from foundation.errors import CodedError


class EngineError(CodedError):
    """Root of everything the engine raises on purpose."""

    code: ClassVar[str] = "engine_error"


class InvalidRequest(EngineError):
    code = "invalid_request"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class GrammarExhausted(InvalidRequest):
    code = "grammar_exhausted"


class EngineOverloaded(EngineError):
    code = "engine_overloaded"


class DeadlineExceeded(EngineError):
    code = "deadline_exceeded"


class TakenBack(EngineError):
    code = "taken_back"


class EngineUnavailable(EngineError):
    code = "engine_unavailable"


class EngineStepFailed(EngineError):
    code = "engine_step_failed"


class ConfigError(EngineError):
    code = "config_error"


class UnsupportedModel(ConfigError):
    code = "unsupported_model"


class ProtocolError(EngineError):
    code = "protocol_error"
