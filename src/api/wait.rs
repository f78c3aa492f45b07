//! CALL awa.wait.

use crate::error::{Error, Result};
use crate::options;
use crate::pg::command;
use crate::pg::datum::Value;
use crate::pg::fmgr::{sql_function, Call, Output};
use crate::pg::time::SECOND;
use crate::wait;

sql_function! {
    awa_wait, pg_finfo_awa_wait => wait;
}

const DEFAULT_TIMEOUT: i64 = 10 * SECOND;
/// A wait always has a deadline.
const LONGEST_TIMEOUT: i64 = 24 * 3600 * SECOND;

fn wait(call: &Call) -> Result<Output> {
    command::refuse_standby("awa.wait()")?;
    options::refuse_unknown(call, 3)?;
    if !call.is_nonatomic_call() || command::in_subtransaction() {
        return Err(Error::InTransactionBlock("CALL awa.wait()".to_string()));
    }
    let names = super::work::queue_names(call, 0)?;
    let timeout = call.interval(1).map_or(DEFAULT_TIMEOUT, |i| i.approx_micros());
    if !(0..=LONGEST_TIMEOUT).contains(&timeout) {
        return Err(Error::bad_value(
            "timeout must be between 0 and 24 hours",
            "Pass an interval such as '10 s', and wait again when it is over.",
        ));
    }
    // Of no queue nothing comes, but who calls it in a loop must not spin.
    let ready = command::with_transaction_control(|| wait::wait(&names, timeout))?;
    Ok(Output::Record(vec![Value::Bool(ready)]))
}
