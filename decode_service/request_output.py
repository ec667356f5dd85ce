"""Takes the tokens of one request, watches for stop strings, and fills the client's stream."""

from decode_service.stop_rule import FinishReason
from decode_service.token_stream import Finish, TokenStream
from serving_core.stop_matcher import StopMatcher
from serving_core.tokenizer import IncrementalDetokenizer


class TextStops:
    """Stop strings of one request; text of the first `min_tokens` tokens cannot match."""

    def __init__(
        self, *, detokenizer: IncrementalDetokenizer, matcher: StopMatcher, min_tokens: int
    ) -> None:
        """Take the request's own detokenizer and matcher."""
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._min_tokens = min_tokens

    def push(self, token_id: int, num_output_tokens: int) -> str | None:
        """Return the stop string that the text now holds, if any."""
        text = self._detokenizer.push([token_id])
        if num_output_tokens > self._min_tokens:
            self._matcher.push(text)
        return self._matcher.matched


class RequestOutput:
    """Owned by the event loop thread."""

    def __init__(self, *, stream: TokenStream, text_stops: TextStops | None) -> None:
        """Fill `stream`; `text_stops` is None for a request without stop strings."""
        self._stream = stream
        self._text_stops = text_stops
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Tokens taken so far."""
        return self._num_tokens

    def take(self, token_id: int, finish: FinishReason | None) -> bool:
        """Take the next token; `finish` says that the sequence ends with it.

        Returns:
            Whether the request wants more.
        """
        if not self._stream.is_open:
            return False
        self._num_tokens += 1
        matched_stop = None
        if self._text_stops is not None:
            matched_stop = self._text_stops.push(token_id, self._num_tokens)
        if not self._stream.put(token_id):
            return False
        if finish is FinishReason.STOP:
            self._stream.finish(Finish(reason=finish, matched_token_id=token_id))
        elif matched_stop is not None:
            # Found in the last token of the allowed length, a stop string is still a stop.
            self._stream.finish(Finish(reason=FinishReason.STOP, matched_stop=matched_stop))
        elif finish is not None:
            self._stream.finish(Finish(reason=finish))
        return self._stream.is_open
