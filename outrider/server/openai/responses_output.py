"""From generated text to the output items of /v1/responses, and the events that a stream sends for them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

from outrider.engine.events import Event
from outrider.grammar import ToolFormat, ToolParser
from outrider.server.openai.token_texts import TokenTexts

Item = dict[str, Any]


class OutputItems:
    """The items so far: messages and function calls, in the order in which the model writes them."""

    def __init__(self, texts: TokenTexts, tool_format: ToolFormat | None) -> None:
        """tool_format: how the model writes tool calls; None: the output is all text."""
        self.items: list[Item] = []
        self._texts = texts
        self._parser = ToolParser(tool_format) if tool_format else None
        self._pieces: list[str] = []
        """The text of the open item, which is the last one: a message's text or a call's arguments."""
        self._logprobs: list[dict[str, Any]] = []
        """The log-probabilities of tokens whose text is still to come."""
        self._open = False

    def push(self, event: Event) -> Iterator[dict[str, Any]]:
        """The stream events for an event of the engine; its last event completes the open item."""
        self._logprobs += [
            self._texts.top(each.token, each.logprob) | {"top_logprobs": [self._texts.top(*top) for top in each.top]}
            for each in event.logprobs
        ]
        for index, call_id, name, text in self._parts(event):
            if index is None:
                yield from self._add_text(text)
            else:
                yield from self._add_call(call_id, name, text)
        if event.finish:
            if not self.items:
                yield from self._begin_message()
            yield from self._end("incomplete" if event.finish == "length" else "completed")

    def _parts(self, event: Event) -> list[list[Any]]:
        """[call index or None, call id, name, text or arguments] in order; adjacent parts of one item are joined."""
        if self._parser is None:
            return [[None, "", "", event.text]] if event.text else []
        out: list[list[Any]] = []
        # a character at a time: the parser does not say how text and calls in one piece are ordered
        parsed = [self._parser.push(char) for char in event.text]
        for each in (*parsed, *([self._parser.finish()] if event.finish else ())):
            found = [[None, "", "", each.content]] if each.content else []
            found += [[call.index, call.id, call.name, call.arguments] for call in each.calls]
            for part in found:
                if out and out[-1][0] == part[0]:
                    out[-1][3] += part[3]
                else:
                    out.append(part)
        return out

    def _add_text(self, text: str) -> Iterator[dict[str, Any]]:
        if not self._open or self.items[-1]["type"] != "message":
            yield from self._end("completed")
            yield from self._begin_message()
        self._pieces.append(text)
        yield self._event("output_text.delta", content_index=0, delta=text, logprobs=self._take_logprobs())

    def _add_call(self, call_id: str, name: str, arguments: str) -> Iterator[dict[str, Any]]:
        """call_id: empty where the call has begun before."""
        if call_id:
            yield from self._end("completed")
            item: Item = {"id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "status": "in_progress"}
            yield from self._begin(item | {"call_id": call_id, "name": name, "arguments": ""})
        self._pieces.append(arguments)
        yield self._event("function_call_arguments.delta", delta=arguments)

    def _begin_message(self) -> Iterator[dict[str, Any]]:
        item: Item = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "status": "in_progress"}
        yield from self._begin(item | {"role": "assistant", "content": []})
        part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self.items[-1]["content"] = [part]
        yield self._event("content_part.added", content_index=0, part=part | {"logprobs": []})

    def _begin(self, item: Item) -> Iterator[dict[str, Any]]:
        self._open = True
        self._pieces.clear()
        self.items.append(item)
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(item)}

    def _end(self, status: str) -> Iterator[dict[str, Any]]:
        """Complete the open item, if any."""
        if not self._open:
            return
        item, whole = self.items[-1], "".join(self._pieces)
        self._open = False
        if item["type"] == "message":
            self._take_logprobs()
            part = item["content"][0]
            part["text"] = whole
            yield self._event("output_text.done", content_index=0, text=whole, logprobs=part["logprobs"])
            yield self._event("content_part.done", content_index=0, part=part)
        else:
            item["arguments"] = whole
            yield self._event("function_call_arguments.done", name=item["name"], arguments=whole)
        item["status"] = status
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _take_logprobs(self) -> list[dict[str, Any]]:
        """Take the log-probabilities for a message's next text, and add them to its item."""
        taken, self._logprobs = self._logprobs, []
        self.items[-1]["content"][0]["logprobs"] += taken
        return taken

    def _event(self, name: str, /, **fields: Any) -> dict[str, Any]:
        """An event of the last item."""
        at = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {"type": f"response.{name}", **at, **fields}
