//! GRES, TRES, counts and sizes.
#![no_main]

use pliant_model::gres;

libfuzzer_sys::fuzz_target!(|text: &str| {
    let total = gres::gpus(text).iter().fold(0_u32, |sum, g| sum.saturating_add(g.count));
    assert_eq!(gres::gpu_total(text), total);
    let indexes = gres::gpu_indexes(text);
    assert!(indexes.is_sorted());
    let _ = (gres::tres_gpus(text), gres::tres_gpu_kind(text), gres::count(text), gres::size_mib(text));
});
