-- Complain if the script is sourced in psql rather than by ALTER EXTENSION.
\echo Use "ALTER EXTENSION awa_queue UPDATE TO '0.2.0'" to load this file. \quit
