//! Classification of datagrams by service.

use coreward_orchestrator::classify::{Classifier, PayloadPattern};

#[test]
fn first_matching_rule_selects_the_service() {
    let payload_pattern = |offset, bytes: &[u8]| Some(PayloadPattern { offset, bytes: bytes.to_vec() });
    let mut classifier = Classifier { rules: vec![(2, payload_pattern(1, &[7])), (0, payload_pattern(0, b"get "))] };
    let classified_services =
        |classifier: &Classifier| [&b"get x"[..], b"g\x07", b"g", b""].map(|text| classifier.classify_request(text));
    assert_eq!(classified_services(&classifier), [Some(0), Some(2), None, None]);
    classifier.rules.push((1, None));
    assert_eq!(classified_services(&classifier), [Some(0), Some(2), Some(1), Some(1)]);
}
