"""One model in step with a lane's text: its forwards, how it reads the prompt, early exits, and the stream itself."""
from playground.decoding.stream.exits import Exit
from playground.decoding.stream.forwards import answer_of, chunk_of, experts_figure
from playground.decoding.stream.model_stream import Stream
from playground.decoding.stream.separate_texts import PIECE, Piece, reading

__all__ = ["PIECE", "Exit", "Piece", "Stream", "answer_of", "chunk_of", "experts_figure", "reading"]
