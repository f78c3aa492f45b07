//! The SQL functions, grouped as the contract groups them. They convert arguments, call the core and map
//! errors; nothing else.

mod by_id;
mod later;
mod lease;
mod operate;
mod produce;
mod read;
mod wait;
mod work;
