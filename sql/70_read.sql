-- Readers.

CREATE FUNCTION awa_internal.library_version () RETURNS text
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_library_version'
STABLE PARALLEL UNSAFE;
COMMENT ON FUNCTION awa_internal.library_version () IS 'Version of the loaded library.';

CREATE FUNCTION awa.has_feature (feature text) RETURNS boolean
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_has_feature'
STABLE PARALLEL UNSAFE;
COMMENT ON FUNCTION awa.has_feature (text) IS
'Whether this version can do something, by the name of a verb or parameter. Ask this rather than a version number.';
