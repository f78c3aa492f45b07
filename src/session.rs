//! Everything that a session remembers of an installation, and how it forgets it: after DROP and CREATE
//! EXTENSION ids start again, and whatever was remembered of the former installation would lose jobs.

pub fn forget() {
    crate::ids::forget();
    crate::lane::forget();
    crate::claim::forget();
    crate::body::forget();
    crate::promote::forget();
    crate::expiry::forget();
    crate::pg::xact::set_queues_valid(false);
}
