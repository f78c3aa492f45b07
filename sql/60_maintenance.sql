-- Single steps of maintenance, for the owner. Each is meant for a transaction of its own, in READ COMMITTED;
-- none waits for anybody; each returns in words what it did or why it did nothing.

CREATE FUNCTION awa_internal.seal () RETURNS text
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_seal'
VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION awa_internal.seal () IS
'Makes an empty slot the current one. Returns: sealed: slot N is current | no empty slot | busy.';

CREATE FUNCTION awa_internal.close (slot integer) RETURNS text
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_close'
VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION awa_internal.close (integer) IS
'Closes a sealed slot that no open transaction has written into. Returns: closed | current | not open | writers left | busy.';

CREATE FUNCTION awa_internal."empty" (slot integer, ignore_retention boolean DEFAULT false) RETURNS text
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_empty'
VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION awa_internal."empty" (integer, boolean) IS
'Empties a closed slot of which every job has ended. Returns: emptied | current | not closed | open: X of Y | retained | snapshot | blocked | busy.';

CREATE FUNCTION awa_internal.adopt () RETURNS text
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_adopt'
VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION awa_internal.adopt () IS
'Takes over tables that came from elsewhere (a logical subscriber before its first verb, a restore of the data alone): sequences above every number in use, a fresh incarnation. Returns: adopted | busy. 25001 outside READ COMMITTED.';

CREATE FUNCTION awa_internal.rescue () RETURNS text
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_rescue'
VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION awa_internal.rescue () IS
'Ends attempts whose lease is over, about 1,000 at a time. Returns: rescued: N | rescued: N, more.';

CREATE FUNCTION awa_internal.promote () RETURNS text
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_promote'
VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION awa_internal.promote () IS
'Makes deferred jobs ready whose time has come, about 1,000 at a time. Returns: promoted: N | promoted: N, more. 25001 outside READ COMMITTED.';

CREATE FUNCTION awa_internal.lane_state (lane_id bigint) RETURNS text
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_lane_state'
VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION awa_internal.lane_state (bigint) IS
'The unresolved ranges of a lane that a claim of this session would start from, for debugging.';

-- Whoever writes the ring or the identity (COPY of a restore, an administrator) makes all sessions read them again.
CREATE FUNCTION awa_internal.ring_changed () RETURNS trigger
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_ring_changed';
COMMENT ON FUNCTION awa_internal.ring_changed () IS 'Statement trigger: makes all sessions read the ring again.';

CREATE TRIGGER ring_changed AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa_internal.ring
FOR EACH STATEMENT EXECUTE FUNCTION awa_internal.ring_changed();
CREATE TRIGGER ring_changed AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa_internal.world
FOR EACH STATEMENT EXECUTE FUNCTION awa_internal.ring_changed();
