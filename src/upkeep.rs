//! The duties of maintenance: what is due, done in steps of one transaction each.

use crate::error::Result;
use crate::pg::command;
use crate::policy;

/// Does all that is due, once, each step in its own transaction.
pub fn run_all() -> Result<()> {
    command::commit_and_begin();
    policy::forget_refusals();
    while policy::step()?.more {
        command::commit_and_begin();
    }
    command::commit_and_begin();
    Ok(())
}
