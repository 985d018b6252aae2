#!/bin/sh
# Run once by the postgres image on an empty volume: the three roles and their rights.
set -eu
run() { psql --set ON_ERROR_STOP=1 --username "$POSTGRES_USER" --dbname "$POSTGRES_DB" "$@"; }
for role in app_owner app_rw app_ops; do
    run --set password="$APP_PASSWORD" --set role="$role" <<'SQL'
CREATE ROLE :"role" LOGIN PASSWORD :'password';
SQL
done
run --command "ALTER DATABASE $POSTGRES_DB OWNER TO app_owner"
run --file /roles.sql
