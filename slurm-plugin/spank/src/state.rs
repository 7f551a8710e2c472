// SPDX-License-Identifier: GPL-2.0-or-later
//! What the plugin remembers between callbacks of one process.

use pliant_protocol::options::Typed;
use std::sync::{Mutex, PoisonError};

static TYPED: Mutex<Option<Typed>> = Mutex::new(None);

/// Changes what was typed so far.
pub fn change(change: impl FnOnce(&mut Typed)) {
    let mut typed = TYPED.lock().unwrap_or_else(PoisonError::into_inner);
    change(typed.get_or_insert_default());
}

/// What was typed so far.
pub fn typed() -> Typed {
    TYPED.lock().unwrap_or_else(PoisonError::into_inner).clone().unwrap_or_default()
}
