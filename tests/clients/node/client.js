// The contract of awa_queue through node-postgres. Connects as PGHOST, PGUSER and PGDATABASE say; prints one line for each check
// that held, and stops with an error at the first that does not.

const assert = require('node:assert/strict');
const { Client } = require('pg');

// Receipts, job ids and all other bigints are strings in JavaScript: a number would lose their last digits.
const isBigint = (v) => typeof v === 'string' && /^\d+$/.test(v);

async function fails(promise, code) {
  try {
    await promise;
  } catch (error) {
    assert.equal(error.code, code, `${error.code}: ${error.message}`);
    assert.ok(error.detail || error.hint, `no detail or hint: ${error.message}`);
    return error;
  }
  return assert.fail(`no error, ${code} was expected`);
}

const checks = {
  async life(db) {
    const one = await db.query('SELECT awa.enqueue($1, $2) AS id', ['node.life', { n: 1 }]);
    assert.ok(isBigint(one.rows[0].id));
    const many = await db.query('SELECT awa.enqueue_batch($1, $2, priority => $3) AS ids', [
      'node.life', [{ n: 2 }, { n: 3 }, { n: 4, text: 'ä "quoted" \\ {brace}, NULL' }], 3]);
    assert.equal(many.rows[0].ids.length, 3);
    assert.ok(many.rows[0].ids.every(isBigint));

    const first = await db.query('SELECT * FROM awa.claim($1, $2, $3, $4)', ['node.life', 2, 'host-1', '90 s']);
    assert.deepEqual(first.rows.map((r) => [r.args, r.priority, r.attempt, r.max_attempts, r.kind]),
      [[{ n: 1 }, 2, 1, 25, 'node.life'], [{ n: 2 }, 3, 1, 25, 'node.life']]);
    assert.deepEqual(first.rows.map((r) => r.job_id), [one.rows[0].id, many.rows[0].ids[0]]);
    assert.ok(first.rows.every((r) => isBigint(r.receipt) && BigInt(r.receipt) > BigInt(Number.MAX_SAFE_INTEGER)));
    assert.ok(first.rows.every((r) => r.lease_until - r.claimed_at === 90000));

    const receipts = first.rows.map((r) => r.receipt);
    const done = await db.query('SELECT * FROM awa.complete($1)', [[receipts[0]]]);
    assert.deepEqual(done.rows.map((r) => [r.receipt, r.state, r.changed]), [[receipts[0], 'completed', true]]);
    const next = await db.query('SELECT * FROM awa.complete_and_claim($1, $2, $3)', [[receipts[1]], ['node.life'], 1]);
    assert.deepEqual(next.rows.map((r) => r.args), [{ n: 3 }]);
    const again = await db.query('SELECT state, changed FROM awa.complete($1)', [receipts]);
    assert.deepEqual(again.rows, [{ state: 'completed', changed: false }, { state: 'completed', changed: false }]);

    const back = await db.query('SELECT state, changed FROM awa.release($1)', [next.rows.map((r) => r.receipt)]);
    assert.deepEqual(back.rows, [{ state: 'ready', changed: true }]);
    const rest = await db.query('SELECT * FROM awa.claim($1, 10)', ['node.life']);
    assert.deepEqual(rest.rows.map((r) => r.args.n).sort(), [3, 4]);
    assert.equal(rest.rows.find((r) => r.args.n === 4).args.text, 'ä "quoted" \\ {brace}, NULL');
    const end = await db.query('SELECT state FROM awa.cancel_claimed($1, $2)', [rest.rows.map((r) => r.receipt), 'enough']);
    assert.deepEqual(end.rows, [{ state: 'cancelled' }, { state: 'cancelled' }]);
  },

  async numbers(db) {
    // As a number, as a BigInt, as text, and as a literal.
    for (const max of [1, 1n, '1']) {
      await db.query('SELECT awa.enqueue($1, $2)', ['node.numbers', '7']);
      assert.equal((await db.query('SELECT * FROM awa.claim($1, $2)', ['node.numbers', max])).rowCount, 1);
    }
    await db.query("SELECT awa.enqueue('node.numbers', '7', priority => 1, max_attempts => 3)");
    const row = (await db.query("SELECT * FROM awa.claim('node.numbers', 1)")).rows[0];
    assert.deepEqual([row.args, row.priority, row.max_attempts], [7, 1, 3]);
    const end = await db.query('SELECT state, changed FROM awa.complete($1)', [[BigInt(row.receipt)]]);
    assert.deepEqual(end.rows, [{ state: 'completed', changed: true }]);
  },

  async arrays(db) {
    for (const verb of ['complete', 'release', 'cancel_claimed']) {
      assert.deepEqual((await db.query(`SELECT * FROM awa.${verb}($1)`, [[]])).rows, []);
      assert.deepEqual((await db.query(`SELECT * FROM awa.${verb}($1)`, [null])).rows, []);
      const unknown = (await db.query(`SELECT * FROM awa.${verb}($1)`, [[null]])).rows;
      assert.deepEqual(unknown.map((r) => [r.receipt, r.job_id, r.state, r.changed]), [[null, null, 'unknown', false]]);
    }
    for (const empty of [[], null]) {
      assert.deepEqual((await db.query('SELECT awa.enqueue_batch($1, $2) AS ids', ['node.arrays', empty])).rows, [{ ids: [] }]);
      assert.deepEqual((await db.query('SELECT * FROM awa.claim_from($1, 5)', [empty])).rows, []);
      assert.deepEqual((await db.query('SELECT * FROM awa.complete_and_claim($1, $2)', [empty, empty])).rows, []);
    }
    await db.query('SELECT awa.enqueue_batch($1, $2, ordering_keys => $3)', ['node.arrays', [1, 2], ['a', null]]);
    const rows = (await db.query('SELECT * FROM awa.claim_from($1, $2)', [['node.arrays', 'node.arrays'], 5])).rows;
    assert.deepEqual(rows.map((r) => [r.args, r.ordering_key]), [[1, 'a'], [2, null]]);
    const mixed = await db.query('SELECT * FROM awa.complete($1)', [[rows[1].receipt, null, rows[0].receipt, rows[1].receipt]]);
    assert.deepEqual(mixed.rows.map((r) => [r.receipt, r.state]),
      [[rows[1].receipt, 'completed'], [null, 'unknown'], [rows[0].receipt, 'completed'], [rows[1].receipt, 'completed']]);
    await fails(db.query('SELECT awa.complete($1)', [[[1, 2], [3, 4]]]), '2202E');
    await fails(db.query('SELECT awa.enqueue_batch($1, $2)', ['node.arrays', [null]]), '22004');
    await fails(db.query('SELECT awa.enqueue_batch($1, $2, ordering_keys => $3)', ['node.arrays', [1, 2], ['a']]), '22023');
    await fails(db.query('SELECT awa.claim_from($1)', [[null]]), '22004');
  },

  async jobs(db) {
    const jobs = [{ queue: 'node.jobs', args: { n: 1 }, tags: ['t'] }, { queue: 'node.jobs', priority: 1, metadata: null }];
    // An array would be sent as one of PostgreSQL's, so JSON that is an array goes as text.
    const put = (await db.query('SELECT * FROM awa.enqueue_jobs($1)', [JSON.stringify(jobs)])).rows;
    assert.deepEqual(put.map((r) => [r.idx, r.status, isBigint(r.job_id)]), [[1, 'ready', true], [2, 'ready', true]]);
    const got = (await db.query('SELECT * FROM awa.claim($1, 5)', ['node.jobs'])).rows;
    assert.deepEqual(got.map((r) => [r.job_id, r.args, r.tags]), [[put[1].job_id, {}, null], [put[0].job_id, { n: 1 }, ['t']]]);
  },

  async errors(db) {
    await fails(db.query('SELECT awa.enqueue($1)', [null]), '22004');
    await fails(db.query('SELECT awa.enqueue($1, priority => $2)', ['q', 9]), '22023');
    await fails(db.query('SELECT awa.claim($1, $2)', ['q', -1]), '22023');
    await fails(db.query('SELECT awa.enqueue($1)', ['q'.repeat(201)]), '54000');
    await fails(db.query('SELECT awa.pause_queue($1)', ['node.missing']), '42704');
    await fails(db.query('SELECT awa.park($1)', [1]), '0A000');
    await fails(db.query('SELECT awa.enqueue($1, unique_key => $2)', ['q', 'k']), '0A000');
    await fails(db.query('SELECT awa.complete($1, strict => $2)', [['1'], true]), '55000');
    await db.query('BEGIN');
    await fails(db.query('CALL awa.maintain()'), '25001');
    await db.query('ROLLBACK');
    await db.query('BEGIN READ ONLY');
    await fails(db.query('SELECT awa.enqueue($1)', ['q']), '25006');
    await db.query('ROLLBACK');
    await db.query('CALL awa.maintain()');
  },

  async transactions(db) {
    await db.query('BEGIN');
    await db.query('SELECT awa.enqueue($1, $2)', ['node.tx', '1']);
    await db.query('ROLLBACK');
    await db.query('BEGIN');
    await db.query('SELECT awa.enqueue($1, $2)', ['node.tx', '2']);
    await db.query('SAVEPOINT s');
    await fails(db.query('SELECT awa.enqueue($1, priority => 0)', ['node.tx']), '22023');
    await db.query('ROLLBACK TO s');
    await db.query('COMMIT');
    const rows = (await db.query('SELECT args FROM awa.claim($1, 9)', ['node.tx'])).rows;
    assert.deepEqual(rows, [{ args: 2 }]);
  },

  async prepared(db) {
    const put = (n) => db.query({ name: 'put', text: 'SELECT awa.enqueue($1, $2) AS id', values: ['node.prepared', String(n)] });
    const work = (done) => db.query({
      name: 'work', text: 'SELECT * FROM awa.complete_and_claim($1, $2, 1)', values: [done, ['node.prepared']] });
    for (let n = 0; n < 20; n += 1) await put(n);
    const seen = [];
    let done = [];
    for (;;) {
      const rows = (await work(done)).rows;
      if (rows.length === 0) break;
      seen.push(rows[0].args);
      done = [rows[0].receipt];
    }
    assert.deepEqual(seen, Array.from({ length: 20 }, (_, n) => n));
  },

  async discard(db) {
    await db.query('SELECT awa.enqueue($1, $2)', ['node.discard', '1']);
    await db.query('DISCARD ALL');
    const rows = (await db.query('SELECT * FROM awa.claim($1)', ['node.discard'])).rows;
    await db.query('DISCARD ALL');
    assert.deepEqual((await db.query('SELECT state, changed FROM awa.complete($1)', [[rows[0].receipt]])).rows,
      [{ state: 'completed', changed: true }]);
    await db.query('DISCARD ALL');
    assert.deepEqual((await db.query('SELECT * FROM awa.claim($1)', ['node.discard'])).rows, []);
  },
};

async function main() {
  const db = new Client();
  await db.connect();
  for (const [name, check] of Object.entries(checks)) {
    await check(db);
    console.log(name);
  }
  await db.end();
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
