"""Proves from the tables that every committed job was done exactly once, and that the sums are right."""

import re

CHECKS = [
    (
        "committed jobs that were not completed exactly once",
        "WITH placed AS (SELECT unnest(job_ids) AS job_id FROM orders),"
        " done AS (SELECT job_id, count(*) AS n FROM results GROUP BY job_id)"
        " SELECT count(*) FROM placed FULL JOIN done USING (job_id)"
        " WHERE placed.job_id IS NULL OR done.n IS DISTINCT FROM 1",
    ),
    (
        "job ids that were given out twice",
        "SELECT count(*) FROM (SELECT job_id FROM (SELECT unnest(job_ids) AS job_id FROM orders"
        " UNION ALL SELECT job_id FROM rolled_back) AS given GROUP BY job_id HAVING count(*) > 1) AS twice",
    ),
    (
        "jobs of rolled-back transactions that a worker saw",
        "SELECT count(*) FROM rolled_back JOIN results USING (job_id)",
    ),
    (
        "difference between jobs placed and closures in the log",
        "SELECT (SELECT sum(cardinality(job_ids)) FROM orders) - (SELECT sum(n) FROM awa_internal.closures"
        " WHERE outcome = 'c')",
    ),
    (
        "files whose lines, words or letters differ from those counted in the file",
        "SELECT count(*) FROM expected FULL JOIN (SELECT file, count(*) AS lines, sum(words) AS words,"
        " sum(letters) AS letters FROM results GROUP BY file) AS found USING (file)"
        " WHERE (expected.lines, expected.words, expected.letters)"
        " IS DISTINCT FROM (found.lines, found.words, found.letters)",
    ),
    ("jobs that are still there to claim", "SELECT count(*) FROM awa.claim('lines', 1000)"),
]


def expect(connection, orders):
    """Counts each file as one text, by a regular expression: another way than the workers', who split single lines."""
    texts = {}
    for order in orders:
        texts.setdefault(order.file, []).extend(text for _, text in order.lines)
    with connection.cursor().copy("COPY expected (file, lines, words, letters) FROM STDIN") as copy:
        for file, lines in texts.items():
            words = re.findall(r"\S+", "\n".join(lines))
            copy.write_row((file, len(lines), len(words), sum(map(len, words))))
    return len(texts)


def check(connection):
    """[(what, number found)]; every number must be 0."""
    return [(what, int(connection.execute(sql).fetchone()[0])) for what, sql in CHECKS]
