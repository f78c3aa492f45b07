"""Proves from the tables that every committed job ended exactly once, as it had to, and that the sums are right."""

import re

import life

# placed: each committed job, at how many attempts it fails, and before when it must not run.
# unfinished: attempts that a handler began and of which nothing was stored: their worker was killed, or too late.
VIEWS = f"""
CREATE VIEW placed AS
SELECT job_id, order_no, stream, not_before, job.fails, job.fails IN ({life.ALWAYS}, {life.NEVER_AGAIN}) AS ends_badly
FROM orders, unnest(job_ids, orders.fails) AS job (job_id, fails);
CREATE VIEW unfinished AS
SELECT job_id, attempt FROM handled EXCEPT (SELECT job_id, attempt FROM results UNION ALL SELECT job_id, attempt FROM failures);
"""

ENDS = (
    "(SELECT placed.*, coalesce(done.n, 0) AS completed, coalesce(dead.n, 0) AS failed"
    " FROM placed FULL JOIN (SELECT job_id, count(*) AS n FROM results GROUP BY job_id) AS done USING (job_id)"
    " FULL JOIN (SELECT job_id, count(*) AS n FROM awa.dead_letters GROUP BY job_id) AS dead USING (job_id)) AS ends"
)

LOST = f"SELECT count(*) FROM {ENDS} WHERE completed + failed = 0"

CHECKS = [
    (
        "committed jobs that did not end exactly once, completed or failed for good as they had to",
        f"SELECT count(*) FROM {ENDS} WHERE job_id IS NULL OR completed <> (NOT ends_badly)::int OR failed <> ends_badly::int",
    ),
    (
        "job ids that were given out twice",
        "SELECT count(*) FROM (SELECT job_id FROM (SELECT job_id FROM placed"
        " UNION ALL SELECT job_id FROM rolled_back) AS given GROUP BY job_id HAVING count(*) > 1) AS twice",
    ),
    (
        "jobs of rolled-back transactions that a worker saw",
        "SELECT count(*) FROM rolled_back JOIN handled USING (job_id)",
    ),
    (
        "scheduled jobs that were done before their time",
        "SELECT count(*) FROM placed JOIN results USING (job_id) WHERE claimed_at < not_before",
    ),
    (
        "difference between attempts of which nothing was stored and rescues",
        "SELECT abs((SELECT count(*) FROM unfinished) - (SELECT rescued_total FROM awa.queue_stats WHERE queue = 'lines'))",
    ),
    (
        "difference between what queue_stats counts and what the clients counted",
        "SELECT abs(enqueued_total - (SELECT count(*) FROM placed)) + abs(completed_total - (SELECT count(*) FROM results))"
        " + abs(failed_total - (SELECT count(*) FROM failures WHERE state = 'failed'))"
        " + abs(retried_total - rescued_total - (SELECT count(*) FROM failures WHERE state = 'retryable'))"
        " FROM awa.queue_stats WHERE queue = 'lines'",
    ),
    (
        "files whose lines, words or letters differ from those counted in the file",
        "SELECT count(*) FROM expected FULL JOIN (SELECT file, count(*) AS lines, sum(words) AS words,"
        " sum(letters) AS letters FROM results GROUP BY file) AS found USING (file)"
        " WHERE (expected.lines, expected.words, expected.letters)"
        " IS DISTINCT FROM (found.lines, found.words, found.letters)",
    ),
    (
        "jobs that still wait or run",
        "SELECT ready + scheduled + retryable + running FROM awa.queue_stats WHERE queue = 'lines'",
    ),
]


def expect(connection, orders):
    """Counts each file as one text, by a regular expression: another way than the workers', who split single lines.
    Lines whose job fails for good do not count."""
    texts = {}
    for order in orders:
        good = [text for i, (_, text) in enumerate(order.lines) if life.ends_well(order.before + i)]
        if good:
            texts.setdefault(order.file, []).extend(good)
    with connection.cursor().copy("COPY expected (file, lines, words, letters) FROM STDIN") as copy:
        for file, lines in texts.items():
            words = re.findall(r"\S+", "\n".join(lines))
            copy.write_row((file, len(lines), len(words), sum(map(len, words))))
    return len({order.file for order in orders})


def load(connection, files):
    """What the handlers did outside of the database."""
    with connection.cursor().copy("COPY handled (job_id, attempt) FROM STDIN") as copy:
        for file in files:
            copy.write(file.read_bytes())


def check(connection):
    """[(what, number found)]; every number must be 0."""
    return [(what, int(connection.execute(sql).fetchone()[0])) for what, sql in CHECKS]
