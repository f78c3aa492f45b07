-- What is not built yet raises 0A000 and says so; awa.has_feature tells beforehand. When something is built its line here goes.

-- Verbs.
SELECT * FROM t.try_all(
    $$SELECT awa.cancel_by_key('q', 'k')$$,
    'SELECT awa.park(1)', 'SELECT awa.resume_parked(NULL)', 'SELECT awa.fail_parked(NULL)',
    $$SELECT awa.drop_queue('q')$$, $$SELECT awa.redrive('q')$$, $$SELECT awa.purge('q')$$, $$SELECT awa.cancel_where('q')$$,
    $$SELECT awa.retry_where('q')$$, $$SELECT awa.move('q', 'r')$$, $$SELECT awa.set_priority('q', 1)$$,
    $$SELECT awa.schedule('s', '* * * * *', 'q')$$, $$SELECT awa.unschedule('s')$$,
    $$SELECT awa.grant_queue('r', 'work')$$, $$SELECT awa.revoke_queue('r', 'work')$$,
    'SELECT awa.why(1)', 'SELECT awa.doctor()', 'SELECT awa.health()',
    'CALL awa.wait_for(1)');
-- Procedures at top level too.
CALL awa.wait_for(1);

-- Parameters.
SELECT * FROM t.try_all(
    $$SELECT awa.enqueue('q', unique_key => 'k')$$,
    $$SELECT awa.enqueue('q', unique_by => '{args}')$$, $$SELECT awa.enqueue('q', unique_until => 'claimed')$$,
    $$SELECT awa.enqueue('q', unique_for => '1 h')$$, $$SELECT awa.enqueue('q', on_duplicate => 'skip')$$,
    $$SELECT awa.enqueue('q', lease => '1 h')$$,
    $$SELECT awa.enqueue('q', after => '{1}')$$, $$SELECT awa.enqueue('q', on_parent_failure => 'cancel')$$,
    $$SELECT awa.enqueue_batch('q', '{1}', unique_keys => '{k}')$$, $$SELECT awa.enqueue_batch('q', '{1}', unique_by => '{args}')$$,
    $$SELECT awa.enqueue_batch('q', '{1}', unique_until => 'claimed')$$, $$SELECT awa.enqueue_batch('q', '{1}', unique_for => '1 h')$$,
    $$SELECT awa.enqueue_batch('q', '{1}', on_duplicate => 'skip')$$, $$SELECT awa.enqueue_batch('q', '{1}', lease => '1 h')$$,
    $$SELECT awa.enqueue_jobs('[{"queue": "q", "unique_key": "k"}]')$$, $$SELECT awa.enqueue_jobs('[{"queue": "q", "unique_by": ["args"]}]')$$,
    $$SELECT awa.enqueue_jobs('[{"queue": "q", "unique_until": "claimed"}]')$$, $$SELECT awa.enqueue_jobs('[{"queue": "q", "unique_for": "1 h"}]')$$,
    $$SELECT awa.enqueue_jobs('[{"queue": "q", "on_duplicate": "skip"}]')$$, $$SELECT awa.enqueue_jobs('[{"queue": "q", "lease": "1 h"}]')$$,
    $$SELECT awa.enqueue_jobs('[{"queue": "q", "after": [1]}]')$$,
    $$SELECT awa.enqueue_jobs('[{"queue": "q", "on_parent_failure": "cancel"}]')$$,
    $$SELECT awa.complete('{1}', outputs => '{1}')$$, $$SELECT awa.complete('{1}', follow_ups => '[]')$$,
    $$SELECT awa.complete_and_claim('{1}', '{q}', outputs => '{1}')$$, $$SELECT awa.complete_and_claim('{1}', '{q}', follow_ups => '[]')$$,
    $$SELECT awa.pause_queue('q', kind => 'k')$$, $$SELECT awa.resume_queue('q', kind => 'k')$$);

-- Queue settings.
SELECT * FROM t.try_all(VARIADIC ARRAY(
    SELECT format('SELECT awa.create_queue(%L, %L)', 'l.q', jsonb_build_object(s.key, s.value))
    FROM jsonb_each('{"max_running": 1, "key_concurrency": 1, "rate_limit": 1.5,
        "rate_burst": 1, "key_rate_limit": 1, "max_depth": 10, "on_full": "skip"}') s));

-- What a program asks instead of a version number.
SELECT f, awa.has_feature(f) FROM unnest(array['enqueue', 'enqueue_batch', 'enqueue_jobs', 'claim', 'claim_from', 'complete', 'complete_and_claim',
    'release', 'cancel_claimed', 'create_queue', 'alter_queue', 'pause_queue', 'resume_queue', 'maintain', 'fail', 'snooze', 'wait', 'run_at',
    'unique_key', '', 'CLAIM']) f;
