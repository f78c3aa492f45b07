//! The contract of awa_queue through tokio-postgres. Connects as PGHOST, PGUSER and PGDATABASE say; prints one line for each
//! check that held, and stops with a panic at the first that does not.

use serde_json::{json, Value};
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, NoTls, Row};

type Params<'a> = &'a [&'a (dyn ToSql + Sync)];

async fn rows(db: &Client, sql: &str, params: Params<'_>) -> Vec<Row> {
    db.query(sql, params)
        .await
        .unwrap_or_else(|e| panic!("{sql}: {e:?}"))
}

/// Runs a statement that must fail with this SQLSTATE, and with a detail or hint.
async fn fails(db: &Client, sql: &str, params: Params<'_>, code: &str) {
    let error = match db.query(sql, params).await {
        Ok(rows) => panic!("{sql} returned {} rows; {code} was expected", rows.len()),
        Err(e) => e,
    };
    let error = error.as_db_error().unwrap_or_else(|| panic!("{sql}: {error:?}"));
    assert_eq!(error.code().code(), code, "{sql}: {error:?}");
    assert!(
        error.detail().is_some() || error.hint().is_some(),
        "{sql}: no detail or hint"
    );
}

fn receipts(rows: &[Row]) -> Vec<i64> {
    rows.iter().map(|r| r.get("receipt")).collect()
}

fn args(rows: &[Row]) -> Vec<Value> {
    rows.iter().map(|r| r.get("args")).collect()
}

fn states(rows: &[Row]) -> Vec<(Option<i64>, String, bool)> {
    rows.iter()
        .map(|r| (r.get("receipt"), r.get("state"), r.get("changed")))
        .collect()
}

async fn life(db: &Client) {
    let id: i64 = rows(
        db,
        "SELECT awa.enqueue($1, $2)",
        &[&"tokio.life", &json!({"n": 1})],
    )
    .await[0]
        .get(0);
    let batch = vec![
        json!({"n": 2}),
        json!({"n": 3, "text": "ä \"quoted\" \\ {brace}, NULL"}),
        Value::Null,
    ];
    let ids: Vec<i64> = rows(
        db,
        "SELECT awa.enqueue_batch($1, $2, priority => $3)",
        &[&"tokio.life", &batch, &3i64],
    )
    .await[0]
        .get(0);
    assert_eq!(ids.len(), 3);

    let first = rows(
        db,
        "SELECT *, (lease_until - claimed_at)::text AS lease FROM awa.claim($1, $2, $3, $4::text::interval)",
        &[&"tokio.life", &2i64, &"host-1", &"90 s"],
    )
    .await;
    assert_eq!(args(&first), [json!({"n": 1}), json!({"n": 2})]);
    for (row, (job, priority)) in first.iter().zip([(id, 2), (ids[0], 3)]) {
        assert_eq!(row.get::<_, i64>("job_id"), job);
        assert_eq!(row.get::<_, i32>("priority"), priority);
        assert_eq!(
            (row.get::<_, i32>("attempt"), row.get::<_, i32>("max_attempts")),
            (1, 25)
        );
        assert_eq!(row.get::<_, String>("kind"), "tokio.life");
        assert_eq!(row.get::<_, Option<Vec<String>>>("tags"), None);
        assert_eq!(row.get::<_, String>("lease"), "00:01:30");
    }
    let held = receipts(&first);
    let done = rows(db, "SELECT * FROM awa.complete($1)", &[&vec![held[0]]]).await;
    assert_eq!(states(&done), [(Some(held[0]), "completed".into(), true)]);
    let next = rows(
        db,
        "SELECT * FROM awa.complete_and_claim($1, $2, $3)",
        &[&vec![held[1]], &vec!["tokio.life"], &1i64],
    )
    .await;
    assert_eq!(args(&next), [batch[1].clone()]);
    let again = rows(db, "SELECT * FROM awa.complete($1)", &[&held]).await;
    assert_eq!(
        states(&again),
        [
            (Some(held[0]), "completed".into(), false),
            (Some(held[1]), "completed".into(), false)
        ]
    );
    let back = rows(db, "SELECT * FROM awa.release($1)", &[&receipts(&next)]).await;
    assert_eq!(back[0].get::<_, String>("state"), "ready");
    let rest = rows(db, "SELECT * FROM awa.claim($1, $2)", &[&"tokio.life", &10i64]).await;
    assert_eq!(rest.len(), 2);
    assert!(args(&rest).contains(&Value::Null) && args(&rest).contains(&batch[1]));
    let end = rows(
        db,
        "SELECT * FROM awa.cancel_claimed($1, $2)",
        &[&receipts(&rest), &"enough"],
    )
    .await;
    assert!(states(&end)
        .iter()
        .all(|(_, state, changed)| state == "cancelled" && *changed));
}

async fn numbers(db: &Client) {
    // The parameters are int8: i64 is what fits; literals in the text fit as they are.
    for n in [1i64, 1 << 40] {
        rows(
            db,
            "SELECT awa.enqueue($1, '7', priority => 1, max_attempts => $2)",
            &[&"tokio.numbers", &3i64],
        )
        .await;
        let got = rows(db, "SELECT * FROM awa.claim($1, $2)", &[&"tokio.numbers", &n]).await;
        assert_eq!(args(&got), [json!(7)]);
        let end = rows(db, "SELECT * FROM awa.complete($1)", &[&receipts(&got)]).await;
        assert!(states(&end)[0].2);
    }
    rows(
        db,
        "SELECT awa.enqueue($1, priority => $2)",
        &[&"tokio.numbers", &None::<i64>],
    )
    .await;
    let got = rows(
        db,
        "SELECT * FROM awa.claim($1, $2)",
        &[&"tokio.numbers", &None::<i64>],
    )
    .await;
    assert_eq!((got.len(), got[0].get::<_, i32>("priority")), (1, 2));
}

async fn arrays(db: &Client) {
    let none: Vec<i64> = Vec::new();
    let absent: Option<Vec<i64>> = None;
    let one_null: Vec<Option<i64>> = vec![None];
    for verb in ["complete", "release", "cancel_claimed"] {
        let sql = format!("SELECT * FROM awa.{verb}($1)");
        assert!(rows(db, &sql, &[&none]).await.is_empty());
        assert!(rows(db, &sql, &[&absent]).await.is_empty());
        let unknown = rows(db, &sql, &[&one_null]).await;
        assert_eq!(states(&unknown), [(None, "unknown".into(), false)]);
        assert_eq!(unknown[0].get::<_, Option<i64>>("job_id"), None);
    }
    let no_args: Vec<Value> = Vec::new();
    let ids: Vec<i64> = rows(
        db,
        "SELECT awa.enqueue_batch($1, $2)",
        &[&"tokio.arrays", &no_args],
    )
    .await[0]
        .get(0);
    assert!(ids.is_empty());
    let no_names: Vec<String> = Vec::new();
    assert!(rows(db, "SELECT * FROM awa.claim_from($1)", &[&no_names])
        .await
        .is_empty());
    assert!(rows(
        db,
        "SELECT * FROM awa.complete_and_claim($1, $2)",
        &[&none, &no_names]
    )
    .await
    .is_empty());

    let keys = vec![Some("a"), None];
    let batch = vec![json!(1), json!(2)];
    rows(
        db,
        "SELECT awa.enqueue_batch($1, $2, ordering_keys => $3)",
        &[&"tokio.arrays", &batch, &keys],
    )
    .await;
    let got = rows(
        db,
        "SELECT * FROM awa.claim_from($1, $2)",
        &[&vec!["tokio.arrays"; 2], &5i64],
    )
    .await;
    assert_eq!(args(&got), batch);
    let found: Vec<Option<String>> = got.iter().map(|r| r.get("ordering_key")).collect();
    assert_eq!(found, [Some("a".to_string()), None]);
    let held = receipts(&got);
    let mixed = vec![Some(held[1]), None, Some(held[0]), Some(held[1])];
    let end = rows(db, "SELECT * FROM awa.complete($1)", &[&mixed]).await;
    assert_eq!(
        end.iter().map(|r| r.get("receipt")).collect::<Vec<Option<i64>>>(),
        mixed
    );
    assert_eq!(states(&end)[1].1, "unknown");
    fails(db, "SELECT awa.complete('{{1,2},{3,4}}')", &[], "2202E").await;
    fails(
        db,
        "SELECT awa.enqueue_batch($1, $2)",
        &[&"tokio.arrays", &vec![None::<Value>]],
        "22004",
    )
    .await;
    fails(db, "SELECT awa.claim_from($1)", &[&vec![None::<String>]], "22004").await;
    let short = vec!["a"];
    fails(
        db,
        "SELECT awa.enqueue_batch($1, $2, ordering_keys => $3)",
        &[&"tokio.arrays", &batch, &short],
        "22023",
    )
    .await;
}

async fn jobs(db: &Client) {
    let jobs = json!([{"queue": "tokio.jobs", "args": {"n": 1}, "tags": ["t"]}, {"queue": "tokio.jobs", "priority": 1}]);
    let put = rows(db, "SELECT * FROM awa.enqueue_jobs($1)", &[&jobs]).await;
    let put: Vec<(i32, i64, String)> = put
        .iter()
        .map(|r| (r.get("idx"), r.get("job_id"), r.get("status")))
        .collect();
    assert_eq!((put[0].0, put[1].0, put[0].2.as_str()), (1, 2, "ready"));
    let got = rows(db, "SELECT * FROM awa.claim($1, $2)", &[&"tokio.jobs", &5i64]).await;
    let ids: Vec<i64> = got.iter().map(|r| r.get("job_id")).collect();
    assert_eq!(ids, [put[1].1, put[0].1]);
    assert_eq!(got[1].get::<_, Vec<String>>("tags"), ["t"]);
}

async fn errors(db: &Client) {
    fails(db, "SELECT awa.enqueue($1)", &[&None::<String>], "22004").await;
    fails(
        db,
        "SELECT awa.enqueue($1, priority => $2)",
        &[&"q", &9i64],
        "22023",
    )
    .await;
    fails(db, "SELECT awa.claim($1, $2)", &[&"q", &-1i64], "22023").await;
    fails(db, "SELECT awa.enqueue($1)", &[&"q".repeat(201)], "54000").await;
    fails(db, "SELECT awa.pause_queue($1)", &[&"tokio.missing"], "42704").await;
    fails(db, "SELECT awa.park($1)", &[&1i64], "0A000").await;
    fails(
        db,
        "SELECT awa.enqueue($1, unique_key => $2)",
        &[&"q", &"k"],
        "0A000",
    )
    .await;
    fails(
        db,
        "SELECT awa.complete($1, strict => $2)",
        &[&vec![1i64], &true],
        "55000",
    )
    .await;
    db.batch_execute("BEGIN").await.unwrap();
    fails(db, "CALL awa.maintain()", &[], "25001").await;
    db.batch_execute("ROLLBACK; BEGIN READ ONLY").await.unwrap();
    fails(db, "SELECT awa.enqueue($1)", &[&"q"], "25006").await;
    db.batch_execute("ROLLBACK").await.unwrap();
    db.batch_execute("CALL awa.maintain()").await.unwrap();
}

async fn transactions(db: &mut Client) {
    let tx = db.transaction().await.unwrap();
    tx.query("SELECT awa.enqueue($1, '1')", &[&"tokio.tx"])
        .await
        .unwrap();
    tx.rollback().await.unwrap();
    let mut tx = db.transaction().await.unwrap();
    tx.query("SELECT awa.enqueue($1, '2')", &[&"tokio.tx"])
        .await
        .unwrap();
    let savepoint = tx.transaction().await.unwrap();
    savepoint
        .query("SELECT awa.enqueue($1, '3')", &[&"tokio.tx"])
        .await
        .unwrap();
    savepoint.rollback().await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(
        args(&rows(db, "SELECT * FROM awa.claim($1, $2)", &[&"tokio.tx", &9i64]).await),
        [json!(2)]
    );
}

async fn prepared(db: &Client) {
    let put = db.prepare("SELECT awa.enqueue($1, $2)").await.unwrap();
    let work = db
        .prepare("SELECT * FROM awa.complete_and_claim($1, $2, $3)")
        .await
        .unwrap();
    for n in 0..20 {
        db.query(&put, &[&"tokio.prepared", &json!(n)]).await.unwrap();
    }
    let (mut seen, mut held) = (Vec::new(), Vec::new());
    loop {
        let got = db
            .query(&work, &[&held, &vec!["tokio.prepared"], &3i64])
            .await
            .unwrap();
        if got.is_empty() {
            break;
        }
        seen.extend(args(&got));
        held = receipts(&got);
    }
    assert_eq!(seen, (0..20).map(|n| json!(n)).collect::<Vec<_>>());
}

/// Statements that are sent before the answer to the one in front has come.
async fn pipeline(db: &Client) {
    let put = db.prepare("SELECT awa.enqueue($1, $2)").await.unwrap();
    let claim = db.prepare("SELECT * FROM awa.claim($1, $2)").await.unwrap();
    let queue = "tokio.pipeline";
    let (one, two) = (json!(1), json!(2));
    let one_parameters: [&(dyn ToSql + Sync); 2] = [&queue, &one];
    let two_parameters: [&(dyn ToSql + Sync); 2] = [&queue, &two];
    let claim_parameters: [&(dyn ToSql + Sync); 2] = [&queue, &5i64];
    let (first, second, got) = tokio::join!(
        db.query(&put, &one_parameters),
        db.query(&put, &two_parameters),
        db.query(&claim, &claim_parameters),
    );
    first.unwrap();
    second.unwrap();
    assert_eq!(args(&got.unwrap()), [one, two]);
}

async fn discard(db: &Client) {
    rows(db, "SELECT awa.enqueue($1, '1')", &[&"tokio.discard"]).await;
    db.batch_execute("DISCARD ALL").await.unwrap();
    let got = rows(db, "SELECT * FROM awa.claim($1)", &[&"tokio.discard"]).await;
    db.batch_execute("DISCARD ALL").await.unwrap();
    let end = rows(db, "SELECT * FROM awa.complete($1)", &[&receipts(&got)]).await;
    assert!(states(&end)[0].2);
    db.batch_execute("DISCARD ALL").await.unwrap();
    assert!(rows(db, "SELECT * FROM awa.claim($1)", &[&"tokio.discard"])
        .await
        .is_empty());
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let setting = |name: &str| std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"));
    let (mut db, connection) = tokio_postgres::Config::new()
        .host(setting("PGHOST"))
        .user(setting("PGUSER"))
        .dbname(setting("PGDATABASE"))
        .connect(NoTls)
        .await
        .unwrap();
    tokio::spawn(async move { connection.await.unwrap() });
    life(&db).await;
    println!("life");
    numbers(&db).await;
    println!("numbers");
    arrays(&db).await;
    println!("arrays");
    jobs(&db).await;
    println!("jobs");
    errors(&db).await;
    println!("errors");
    transactions(&mut db).await;
    println!("transactions");
    prepared(&db).await;
    println!("prepared");
    pipeline(&db).await;
    println!("pipeline");
    discard(&db).await;
    println!("discard");
}
