"""The clock that a test sets, in one session."""


class Clock:
    def __init__(self, session):
        self.session = session
        self.offset = 0

    def forward(self, seconds):
        self.offset += int(seconds * 1000)
        self.session.sql(f"SET awa_queue.clock_offset = {self.offset}")
