-- Nothing is granted to PUBLIC, not even EXECUTE. A role that works with queues needs USAGE on schema awa and
-- EXECUTE on the verbs that it may use, and no right on any table: the verbs write the logs natively and
-- run their few statements on other tables as the owner. awa_internal is for the owner alone.
REVOKE ALL ON SCHEMA awa, awa_internal FROM PUBLIC;
REVOKE ALL ON ALL ROUTINES IN SCHEMA awa, awa_internal FROM PUBLIC;
REVOKE ALL ON ALL TABLES IN SCHEMA awa, awa_internal FROM PUBLIC;
REVOKE ALL ON ALL SEQUENCES IN SCHEMA awa, awa_internal FROM PUBLIC;
REVOKE ALL ON TYPE awa_internal.job_rest FROM PUBLIC;
