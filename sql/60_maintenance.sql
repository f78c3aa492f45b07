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

CREATE FUNCTION awa_internal.lane_state (lane_id bigint) RETURNS text
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_lane_state'
VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION awa_internal.lane_state (bigint) IS
'The unresolved ranges of a lane that a claim of this session would start from, for debugging.';
