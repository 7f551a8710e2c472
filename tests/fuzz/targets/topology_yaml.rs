//! topology.yaml: what is read has passed its check.
#![no_main]

use pliant_model::conf::topology_yaml;
use pliant_model::hostlist::MAX_NAMES;

libfuzzer_sys::fuzz_target!(|text: &str| {
    match topology_yaml::parse("f", text) {
        Err(e) => assert!(e.line <= text.lines().count() + 1 && !e.reason.contains('\n'), "{e}"),
        Ok(all) => {
            for tree in all.iter().map(|t| &t.switches) {
                assert!(tree.check().is_ok() && tree.node_count() <= MAX_NAMES);
            }
        }
    }
});
