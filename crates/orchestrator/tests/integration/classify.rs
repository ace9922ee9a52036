//! Classification of datagrams by service.

use coreward_orchestrator::classify::{PayloadPattern, RequestClassifier};

#[test]
fn first_matching_rule_selects_the_service() {
    let payload_pattern =
        |offset, bytes: &[u8]| Some(PayloadPattern { byte_offset: offset, expected_bytes: bytes.to_vec() });
    let mut classifier = RequestClassifier {
        services_and_patterns: vec![(2, payload_pattern(1, &[7])), (0, payload_pattern(0, b"get "))],
    };
    let classified_services = |classifier: &RequestClassifier| {
        [&b"get x"[..], b"g\x07", b"g", b""].map(|text| classifier.classify_request(text))
    };
    assert_eq!(classified_services(&classifier), [Some(0), Some(2), None, None]);
    classifier.services_and_patterns.push((1, None));
    assert_eq!(classified_services(&classifier), [Some(0), Some(2), Some(1), Some(1)]);
}
