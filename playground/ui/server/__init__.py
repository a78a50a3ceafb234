"""The process behind the pages: workers, queue, streams, routes."""
