//! What goes wrong, and what must not come of it.

use super::*;
