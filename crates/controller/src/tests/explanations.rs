//! Tests of the explanations of packets' destinations.

use super::*;

#[test]
fn explanations_contain_the_decision_and_its_reason() {
    let loads: [&[f64]; 3] = [&[0.9, 0.1, 0.9, 0.9], &[0.2, 0.8, 0.8, 0.8], &[0.5; 4]];
    let compute_bucket = |port| {
        RssKey::microsoft_verification_key()
            .toeplitz_hash(&FourTuple::new(client_address(port), web_service_address().vip_and_port).unwrap().bytes())
            & 127
    };
    // Client port whose bucket belongs to core 1.
    let port = (40_000..).find(|port| compute_bucket(*port) % 4 == 1).unwrap();
    let bucket = compute_bucket(port);

    let mut harness = ControllerHarness::new(&THREE_ACTIVE_SERVERS, "crossrss");
    assert_eq!(harness.explain_new_connection(port, now_at_ms(0)).reason, "no table has been made yet");
    harness.make_table(now_at_ms(0));
    assert!(
        harness.explain_new_connection(port, now_at_ms(0)).reason.ends_with("by the bucket alone: no loads are known")
    );
    harness.connect_and_report_loads(&loads);
    harness.make_table(now_at_ms(100));
    let explanation = harness.explain_new_connection(port, now_at_ms(100));
    assert_eq!(explanation.chosen_server.as_deref(), Some("s0"));
    assert_eq!(
        explanation.reason,
        format!(
            "bucket {bucket} of 128 goes to s0: core 1 with load 0.100 in the table is the least loaded that it reaches"
        )
    );
    let s1 = &explanation.servers[1];
    assert_eq!((s1.name.as_str(), s1.bucket, s1.core, s1.core_load), ("s1", Some(bucket), Some(1), Some(0.8)));

    let mut harness = ControllerHarness::new(&THREE_ACTIVE_SERVERS, "crossrss-plus");
    harness.connect_and_report_loads(&loads);
    let table = harness.make_table(now_at_ms(100));
    let allowed_count = (coreward_model::load::load_to_fixed_point(0.5)
        - coreward_model::load::load_to_fixed_point(0.1))
        / table.assignment_cost;
    assert_eq!(
        harness.explain_new_connection(port, now_at_ms(100)).reason,
        format!(
            "bucket {bucket} of 128 goes to s0: core 1 with load 0.100 in the table is the least loaded of 3 \
             candidates, unless a load balancer has given it more than {allowed_count} connections since the last \
             table, each counted as {:.4}; then s2 (core 1 with load 0.500 in the table)",
            f64::from(table.assignment_cost) / 1_048_576.0
        )
    );

    let mut harness = ControllerHarness::new(&THREE_ACTIVE_SERVERS, "rr");
    harness.make_table(now_at_ms(0));
    let explanation = harness.explain_new_connection(port, now_at_ms(0));
    assert_eq!(
        (explanation.chosen_server, explanation.reason.as_str()),
        (
            None,
            "the 3 servers that take new connections (s0, s1, s2) have their turns in this order, counted by the load \
             balancer"
        )
    );

    let mut harness = ControllerHarness::new(&THREE_ACTIVE_SERVERS, "awrr");
    harness.connect_and_report_loads(&[&[0.25; 4], &[0.5; 4], &[0.75; 4]]);
    harness.make_table(now_at_ms(100));
    assert_eq!(
        harness.explain_new_connection(port, now_at_ms(100)).reason,
        "the 3 servers that take new connections (s0 13, s1 10, s2 8) have these shares of 31 turns, evenly spread, \
         counted by the load balancer"
    );

    let mut harness = ControllerHarness::new(&THREE_ACTIVE_SERVERS, "least");
    harness.connect_and_report_loads(&loads);
    harness.make_table(now_at_ms(100));
    let reason = harness.explain_new_connection(port, now_at_ms(100)).reason;
    assert!(reason.contains(": the whole server with load 1.000 in the table is the least loaded of 3"), "{reason}");

    let mut harness = ControllerHarness::new(&THREE_ACTIVE_SERVERS, "hash");
    harness.connect_and_report_loads(&loads);
    harness.make_table(now_at_ms(100));
    let reason = harness.explain_new_connection(port, now_at_ms(100)).reason;
    assert!(reason.contains(" of 128 by a hash that only load balancers use goes to s"), "{reason}");
    assert!(reason.ends_with("by the bucket alone, independent of loads"), "{reason}");

    let mut harness = ControllerHarness::new(&THREE_ACTIVE_SERVERS, "pow2");
    harness.connect_and_report_loads(&loads);
    harness.make_table(now_at_ms(100));
    let explanation = harness.explain_new_connection(port, now_at_ms(100));
    assert!(explanation.reason.contains("(mean load 0."), "{}", explanation.reason);

    let explanation = ControllerHarness::new(&THREE_ACTIVE_SERVERS, "rr\"\nforwarding = \"gue")
        .explain_new_connection(40_000, now_at_ms(0));
    let port = coreward_model::forwarding::gue_source_port([10, 1, 0, 7].into(), [0x9c, 0x40, 0, 80]);
    assert_eq!((&*explanation.forwarding, explanation.outer_source_port), ("gue", Some(port)));
    let explanation = harness.explain_new_connection(40_000, now_at_ms(100));
    assert_eq!((&*explanation.forwarding, explanation.outer_source_port), ("l2", None));

    let unknown_address = ServiceAddress { vip_and_port: "10.200.0.9:80".parse().unwrap(), ..web_service_address() };
    let explain_result = harness.controller.explain_packet(
        unknown_address,
        client_address(1),
        ExplainedPacket::NewConnection,
        now_at_ms(100),
    );
    let expected_error = "no service at 10.200.0.9:80/tcp: expected one of 10.200.0.1:80/tcp";
    assert_eq!(explain_result.unwrap_err().to_string(), expected_error);
}

#[test]
fn established_packets_are_explained_by_their_cookie() {
    let mut harness = ControllerHarness::new(&["active", "draining"], "rr");
    harness.make_table(now_at_ms(0));
    let keys = harness.controller.fleet().key_ring.keys;
    let tuple = FourTuple::new(client_address(7), web_service_address().vip_and_port).unwrap();
    let build_established_packet = |cookie| ExplainedPacket::Established { tsecr: Some(cookie), is_reset: false };
    let time_key = CookieKey { k0: 1, k1: 2 };
    for name in ["s0", "s1"] {
        let id = harness.controller.fleet().server_id(name).unwrap();
        let tsecr = cookie::stamp_tsval(&keys, &time_key, &tuple, Cookie::Server(id), 12_345);
        let explanation = harness.explain_packet(7, build_established_packet(tsecr), now_at_ms(0));
        assert_eq!(explanation.chosen_server.as_deref(), Some(name));
        assert_eq!(explanation.reason, format!("its cookie, made with key 0, names server id {}, {name}", id.get()));
        // From another client port, the same TSecr names another server or none.
        assert_ne!(
            harness.explain_packet(8, build_established_packet(tsecr), now_at_ms(0)).chosen_server.as_deref(),
            Some(name)
        );
    }
    let entry_tsval = cookie::stamp_tsval(&keys, &time_key, &tuple, Cookie::TableIndex(17), 12_345);
    let reason = harness.explain_packet(7, build_established_packet(entry_tsval), now_at_ms(0)).reason;
    assert!(reason.contains("an entry of a connection table, which this service does not have"), "{reason}");

    let packet_without_timestamps = |is_reset| ExplainedPacket::Established { tsecr: None, is_reset };
    let explanation = harness.explain_packet(7, packet_without_timestamps(false), now_at_ms(0));
    assert_eq!(explanation.chosen_server.as_deref(), Some("s0"), "the only one that takes connections has all buckets");
    assert!(explanation.reason.starts_with("without a cookie it follows the load balancer's flow table, or"));
    let explanation = harness.explain_packet(7, packet_without_timestamps(true), now_at_ms(0));
    assert!(
        explanation.chosen_server.is_none() && explanation.reason.contains("it is broadcast"),
        "{}",
        explanation.reason
    );
}
