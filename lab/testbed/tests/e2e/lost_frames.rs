//! Frames that the load balancer's program transmits and its device drops.

use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;

use coreward_testbed::addresses::{HOST_DEVICE, SERVICE_ADDRESS};
use coreward_testbed::fleet::{Fleet, TestbedFleetOptions};
use coreward_testbed::rss_emulation::attach_xdp_pass_program;
use coreward_testbed::{
    DEFAULT_WAIT_TIMEOUT, NetworkNamespace, Testbed, TestbedOptions, find_missing_testbed_rights, skip_if,
};
use serde_json::Value;

use crate::support::{self, assert_eventually, fetch_metrics_page};

const LB_METRICS_ADDRESS: &str = "127.0.0.1:9440";

fn run_script(testbed: &Testbed, namespace: &NetworkNamespace, command: &str) {
    let mut shell = Command::new("sh");
    shell.args(["-ec", command]);
    testbed.run_command(namespace, shell).unwrap();
}

struct LostFramesEnv {
    fleet: Fleet,
    testbed: Testbed,
}

impl LostFramesEnv {
    /// Starts the environment. Before the daemon starts, the command `switch_script` changes the switch's end of the
    /// load balancer's link.
    fn start(instance: &str, switch_script: &str) -> Self {
        let options =
            TestbedOptions { instance_name: instance.to_owned(), server_count: 2, core_count: 1, ..Default::default() };
        let testbed = Testbed::create(options).unwrap();
        run_script(&testbed, testbed.switch(), switch_script);
        let metrics_config = format!("metrics = \"{LB_METRICS_ADDRESS}\"\n");
        let options = TestbedFleetOptions {
            steers_connections: false,
            extra_load_balancer_text: metrics_config,
            ..TestbedFleetOptions::default()
        };
        let fleet = Fleet::start(&testbed, options).unwrap();
        Self { fleet, testbed }
    }

    fn query_lb_state(&self) -> Value {
        let status = self.fleet.query_status(&self.testbed).unwrap_or_default();
        status["load_balancers"][0]["state"].clone()
    }

    /// Returns whether the client can establish a new connection within `limit`.
    fn can_connect(&self, limit: Duration) -> bool {
        let try_connect = || Ok(TcpStream::connect_timeout(&SERVICE_ADDRESS.into(), limit).is_ok());
        self.testbed.client().run_within(try_connect).unwrap()
    }

    fn query_lb_warnings(&self) -> String {
        self.query_lb_state()["warnings"].to_string()
    }

    /// Returns the value of a time series in the load balancer's metrics.
    fn fetch_metric_value(&self, series: &str) -> f64 {
        let page =
            fetch_metrics_page(&self.testbed, self.testbed.load_balancer(1).unwrap(), LB_METRICS_ADDRESS).unwrap();
        support::find_metric_series_value(&page, series).unwrap_or_else(|| panic!("no {series} in {page}"))
    }
}

#[test]
fn dropped_frames_and_failing_handshakes_are_reported() {
    skip_if!(find_missing_testbed_rights());
    let env = LostFramesEnv::start("lostframes", "");
    let _nginx_servers = [1, 2].map(|number| env.testbed.start_nginx(number).unwrap());
    (0..20).for_each(|_| assert!(env.can_connect(*DEFAULT_WAIT_TIMEOUT)));
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "no warning", || env.query_lb_warnings() == "[]");

    // veth drops frames that XDP sends to a device that has neither an XDP program nor GRO.
    run_script(&env.testbed, env.testbed.switch(), "ip link set dev lb1 xdp off; ethtool -K lb1 gro off");
    let dropped_frames_warning = format!("{HOST_DEVICE} drops frames that XDP sent");
    let failing_handshakes_warning = "service web0: most new connections do not become established";
    let missing_program_warning = format!("the other end of the veth {HOST_DEVICE} has no XDP program");
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "status has all three", || {
        (0..8).for_each(|_| assert!(!env.can_connect(Duration::from_millis(50))));
        [&dropped_frames_warning, failing_handshakes_warning, &missing_program_warning]
            .iter()
            .all(|warning| env.query_lb_warnings().contains(*warning))
    });
    assert_eq!(env.fetch_metric_value("coreward_lb_service_handshakes_fail{service=\"web0\"}"), 1.0);
    assert!(env.fetch_metric_value("coreward_lb_send_drops_total") >= 20.0);

    attach_xdp_pass_program(env.testbed.switch(), "lb1").unwrap();
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "the warnings end", || {
        assert!(env.can_connect(*DEFAULT_WAIT_TIMEOUT));
        env.query_lb_warnings() == "[]"
    });
}

/// Tests that clients can still connect after the daemon was killed, with native and with generic XDP. Native XDP would
/// fail if the veth's other end had only GRO, because only the daemon's frames wake that end's poll.
#[test]
fn new_connections_continue_when_the_daemon_is_killed() {
    skip_if!(find_missing_testbed_rights());
    for (instance, switch_script, mode) in [
        ("killednative", "", "native"),
        ("killedgeneric", "ip link set dev lb1 xdp off; ethtool -K lb1 gro on", "generic"),
    ] {
        let mut env = LostFramesEnv::start(instance, switch_script);
        run_script(&env.testbed, env.testbed.load_balancer(1).unwrap(), &format!("ethtool -K {HOST_DEVICE} tso off"));
        let _nginx_servers = [1, 2].map(|number| env.testbed.start_nginx(number).unwrap());
        assert_eventually(*DEFAULT_WAIT_TIMEOUT, "the load balancer reports", || {
            env.query_lb_state()["xdp_mode"] == mode
        });
        (0..20).for_each(|n| assert!(env.can_connect(*DEFAULT_WAIT_TIMEOUT), "connection {n}, {mode}"));
        env.fleet.kill_daemon("lb1").unwrap();
        (0..20).for_each(|n| assert!(env.can_connect(*DEFAULT_WAIT_TIMEOUT), "connection {n} after SIGKILL, {mode}"));
    }
}
