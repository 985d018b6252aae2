-- The three roles of the database. Every statement stands on one line: PostgreSQL's single-user mode reads them that way.
-- app_owner owns the tables and runs migrations. app_ops (admin, settler, roll-ups) may use every table; row-level security lets it in by policies of its own.
-- app_rw serves tenants: it gets nothing by default, each migration grants it the tables that row-level security protects.
REVOKE ALL ON DATABASE rubato FROM PUBLIC;
GRANT CONNECT ON DATABASE rubato TO app_rw, app_ops;
ALTER SCHEMA public OWNER TO app_owner;
REVOKE ALL ON SCHEMA public FROM PUBLIC;
GRANT USAGE ON SCHEMA public TO app_rw, app_ops;
ALTER DEFAULT PRIVILEGES FOR ROLE app_owner IN SCHEMA public GRANT SELECT, INSERT, UPDATE, DELETE ON TABLES TO app_ops;
ALTER DEFAULT PRIVILEGES FOR ROLE app_owner IN SCHEMA public GRANT USAGE, SELECT ON SEQUENCES TO app_ops, app_rw;
