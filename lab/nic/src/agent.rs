//! Runs the real agent in a guest, both as `coreward agent rss` and as the daemon with a controller.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use coreward_model::rss::{IndirectionTable, RssConfig, RssKey};
use coreward_model::{FourTuple, ServerId};
use serde::Deserialize;
use serde_json::Value;

use crate::guest::QemuGuest;
use crate::guest_tap::{IPV4_SYN_DESTINATION, IPV6_SYN_DESTINATION, MEASURED_FLOW_COUNT};

/// Maximum time until a daemon is ready. Under emulation, the BPF verifier alone takes seconds.
pub const DAEMON_START_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum time until a daemon detects a change. Daemons poll for changes once a second.
const SETTING_CHANGE_DETECTION_TIMEOUT: Duration = Duration::from_secs(15);

/// Id of the fleet's only server, which is the seed of the server's balanced indirection table.
const FLEET_SERVER_ID: u64 = 4711;
/// RSS key of the fleet, which is stored in the controller's secret file.
const FLEET_RSS_KEY: &str = "c0:4e:3a:dd:00:11:22:33:44:55:66:77:88:99:aa:bb:cc:dd:ee:ff:\
                         10:32:54:76:98:ba:dc:fe:0f:1e:2d:3c:4b:5a:69:78:87:96:a5:b4";

/// Returns the guest's configuration files, as pairs of name (without leading slash) and content.
pub fn agent_guest_config_files() -> [(&'static str, String); 5] {
    let controller_config = "listen = \"127.0.0.1:7400\"\nstore = \"/run/controller.redb\"\nfleet = \"fleet.toml\"\n\
                      rss_key_file = \"rss.key\"\n";
    let fleet_document = format!(
        "[[server]]\nname = \"s1\"\naddress = \"10.2.0.11\"\nid = {FLEET_SERVER_ID}\n\n\
         [[service]]\nname = \"web\"\nvip = \"{IPV4_SYN_DESTINATION}\"\n\n\
         [[service]]\nname = \"web-ipv6\"\nvip = \"{IPV6_SYN_DESTINATION}\"\n"
    );
    let agent_config = "server = \"s1\"\ncontroller = \"127.0.0.1:7400\"\ninterface = \"eth0\"\n\
                 pin_directory = \"/sys/fs/bpf/coreward\"\nmanage_rss = true\nsteer = \"off\"\n";
    let lb_config = "name = \"lb1\"\ncontroller = \"127.0.0.1:7400\"\ninterface = \"eth0\"\n\
                    pin_directory = \"/sys/fs/bpf/coreward-lb\"\nxdp_mode = \"generic\"\n";
    [
        ("etc/lb.toml", lb_config.to_owned()),
        ("etc/controller.toml", controller_config.to_owned()),
        ("etc/fleet.toml", fleet_document),
        ("etc/rss.key", FLEET_RSS_KEY.to_owned()),
        ("etc/agent.toml", agent_config.to_owned()),
    ]
}

/// Returns the RSS settings that an agent with `manage_rss` gives to a NIC that had `rss_before`. The key changes only
/// if the driver accepts one.
pub fn expected_managed_rss(rss_before: &RssConfig, accepts_key: bool, receive_queues: u16) -> Result<RssConfig> {
    let key = if accepts_key { FLEET_RSS_KEY.parse()? } else { rss_before.key.clone() };
    let table_seed = ServerId::try_from(FLEET_SERVER_ID)?.get().into();
    let entry_count = rss_before.indirection_table.entry_count();
    Ok(RssConfig {
        key,
        indirection_table: IndirectionTable::draw_balanced_entries(table_seed, entry_count, receive_queues)?,
    })
}

/// Line in the output of `coreward agent rss --json`.
#[derive(Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum RssWatchLine {
    Nic { key: String, indirection_table: Vec<u32> },
    Syn { source: SocketAddr, destination: SocketAddr, predicted_queue: u16, actual_queue: u16 },
    End { verdict: String },
}

/// Parsed output of `coreward agent rss`.
pub struct RssWatchOutput {
    /// RSS key and indirection table that the agent read from the NIC.
    pub shown_rss: RssConfig,
    /// Flow of each SYN, with the predicted queue and the actual one.
    pub predicted_and_actual_queues: Vec<(FourTuple, u16, u16)>,
    /// Verdict on whether the NIC uses the shown settings, which is `in_force`, `not_in_force` or `undecided`.
    pub verdict: String,
}

/// Starts `coreward agent rss` and waits until it samples SYNs. Fails when it does not start.
pub fn start_rss_agent(guest: &mut QemuGuest) -> Result<()> {
    let limit_seconds = DAEMON_START_TIMEOUT.as_secs();
    guest.run_successfully(&format!(
        "start rss coreward agent rss --interface eth0 --seconds {limit_seconds} --syns {MEASURED_FLOW_COUNT} --json"
    ))?;
    let wait_result = poll_guest_until_some(guest, DAEMON_START_TIMEOUT, |guest| {
        Ok(guest.run_successfully("cat /tmp/rss.out")?.contains("\"nic\"").then_some(()))
    });
    wait_result.with_context(|| format!("`coreward agent rss`: {}", read_log_tail(guest, "rss")))
}

/// Waits until the agent has received all SYNs, and returns its output. Fails when the agent fails or its output is
/// invalid.
pub fn wait_for_rss_watch_output(guest: &mut QemuGuest) -> Result<RssWatchOutput> {
    // The exit status is ignored, because it depends on the verdict.
    guest.try_run("finished rss", DAEMON_START_TIMEOUT + SETTING_CHANGE_DETECTION_TIMEOUT)?;
    let (mut shown_rss, mut syn_queues, mut final_verdict) = (None, Vec::new(), None);
    for text in guest.run_successfully("cat /tmp/rss.out")?.lines().filter(|line| line.starts_with('{')) {
        match serde_json::from_str(text).with_context(|| text.to_owned())? {
            RssWatchLine::Nic { key, indirection_table } => {
                shown_rss = Some(parse_rss_config(&key, &indirection_table)?)
            }
            RssWatchLine::Syn { source, destination, predicted_queue, actual_queue } => {
                syn_queues.push((FourTuple::new(source, destination)?, predicted_queue, actual_queue));
            }
            RssWatchLine::End { verdict } => final_verdict = Some(verdict),
        }
    }
    let (Some(shown_rss), Some(verdict)) = (shown_rss, final_verdict) else {
        bail!("no verdict: {}", read_log_tail(guest, "rss"))
    };
    Ok(RssWatchOutput { shown_rss, predicted_and_actual_queues: syn_queues, verdict })
}

fn parse_rss_config(key: &str, table: &[u32]) -> Result<RssConfig> {
    Ok(RssConfig { key: key.parse::<RssKey>()?, indirection_table: IndirectionTable::new(table)? })
}

/// Controller and agent (with `manage_rss`) that run in a guest.
pub struct ControllerAndAgent;

impl ControllerAndAgent {
    /// Starts the controller and the agent, and waits until the agent has reported the RSS settings `expected_rss`.
    /// Fails after a time limit, with the ends of both logs.
    pub fn start(guest: &mut QemuGuest, expected_rss: &RssConfig) -> Result<Self> {
        guest.run_successfully("start controller coreward controller --config /etc/controller.toml")?;
        guest.run_successfully("start agent coreward agent --config /etc/agent.toml")?;
        let wait_result = poll_guest_until_some(guest, DAEMON_START_TIMEOUT, |guest| {
            Ok(fetch_single_server_status(guest)?
                .filter(|server| parse_reported_rss(server).is_some_and(|rss| rss == *expected_rss))
                .map(drop))
        });
        wait_result.with_context(|| read_agent_and_controller_logs(guest))?;
        Ok(Self)
    }

    /// Returns how many SYNs the agent has counted on the queue that it predicted, and how many on other queues. Fails
    /// when the controller has no counts.
    pub fn fetch_syn_match_counts(&self, guest: &mut QemuGuest) -> Result<(u64, u64)> {
        let server = fetch_single_server_status(guest)?.context("the controller knows no server")?;
        let read_counter_value = |name: &str| server[name].as_u64().with_context(|| format!("no {name} in {server}"));
        Ok((read_counter_value("rss_matched_syns")?, read_counter_value("rss_mismatched_syns")?))
    }

    /// Waits until the agent has counted `syn_count` SYNs since `counts_before`. Returns how many of them arrived on
    /// the predicted queue. Fails after a time limit.
    pub fn wait_and_count_matched_syns(
        &self,
        guest: &mut QemuGuest,
        counts_before: (u64, u64),
        syn_count: u64,
    ) -> Result<u64> {
        let new_matched_syns = poll_guest_until_some(guest, SETTING_CHANGE_DETECTION_TIMEOUT, |guest| {
            let syn_match_counts = self.fetch_syn_match_counts(guest)?;
            Ok((syn_match_counts.0 + syn_match_counts.1 >= counts_before.0 + counts_before.1 + syn_count)
                .then_some(syn_match_counts.0 - counts_before.0))
        });
        new_matched_syns.with_context(|| read_agent_and_controller_logs(guest))
    }

    /// Waits until the agent warns that the NIC does not use its RSS table, or until this warning ends if
    /// `is_warning_expected` is `false`. Fails after a time limit.
    pub fn wait_for_rss_warning(&self, guest: &mut QemuGuest, is_warning_expected: bool) -> Result<()> {
        let wait_result = poll_guest_until_some(guest, SETTING_CHANGE_DETECTION_TIMEOUT, |guest| {
            let Some(server) = fetch_single_server_status(guest)? else { return Ok(None) };
            Ok((server["warnings"].to_string().contains("not in force") == is_warning_expected).then_some(()))
        });
        wait_result.with_context(|| read_agent_and_controller_logs(guest))
    }

    /// Stops the agent, and then the controller. Fails when one of them does not end, or the agent exits with an error.
    pub fn stop(self, guest: &mut QemuGuest) -> Result<()> {
        let (exit_status, _) = guest.try_run("stop agent", SETTING_CHANGE_DETECTION_TIMEOUT)?;
        ensure!(exit_status == 0, "the agent ended with status {exit_status}: {}", read_log_tail(guest, "agent"));
        guest.try_run("stop controller", SETTING_CHANGE_DETECTION_TIMEOUT)?;
        guest.run_successfully("coreward agent --config /etc/agent.toml --detach")?;
        Ok(())
    }
}

/// Runs a controller and a load balancer until the load balancer uses its placement table, for which it waits for RCU
/// grace periods. Fails after a time limit, with the ends of both logs.
pub fn run_load_balancer_until_ready(guest: &mut QemuGuest) -> Result<String> {
    guest.run_successfully("ip addr add 10.2.0.1/24 dev eth0")?;
    guest.run_successfully("start controller coreward controller --config /etc/controller.toml")?;
    guest.run_successfully("start lb coreward lb --config /etc/lb.toml")?;
    let generation = poll_guest_until_some(guest, DAEMON_START_TIMEOUT, |guest| {
        let status = fetch_fleet_status(guest)?;
        let table_generation =
            status.as_ref().and_then(|fleet| fleet["load_balancers"][0]["state"]["table_generations"]["web"].as_u64());
        Ok(table_generation.filter(|generation| *generation > 0))
    });
    let generation = generation.with_context(|| {
        format!("load balancer: {}\ncontroller: {}", read_log_tail(guest, "lb"), read_log_tail(guest, "controller"))
    })?;
    for name in ["lb", "controller"] {
        let (exit_status, _) = guest.try_run(&format!("stop {name}"), SETTING_CHANGE_DETECTION_TIMEOUT)?;
        ensure!(exit_status == 0, "{name} ended with status {exit_status}: {}", read_log_tail(guest, name));
    }
    guest.run_successfully("coreward lb --config /etc/lb.toml --detach && ip addr del 10.2.0.1/24 dev eth0")?;
    Ok(format!("generation {generation}"))
}

/// Returns the status of the fleet's only server, as `coreward status` reports it, or `None` if it is not reported yet.
fn fetch_single_server_status(guest: &mut QemuGuest) -> Result<Option<Value>> {
    Ok(fetch_fleet_status(guest)?.and_then(|fleet| fleet["servers"].get(0).cloned()))
}

/// Returns the output of `coreward status`, or `None` while the controller does not answer. Fails when it is not JSON.
pub fn fetch_fleet_status(guest: &mut QemuGuest) -> Result<Option<Value>> {
    let (exit_status, status_json) = guest.try_run(
        "COREWARD_TOKEN_FILE=/run/operator.token coreward status --format json --rss-keys 2>/dev/null",
        SETTING_CHANGE_DETECTION_TIMEOUT,
    )?;
    if exit_status != 0 {
        return Ok(None);
    }
    Ok(Some(serde_json::from_str(status_json.trim()).with_context(|| status_json.clone())?))
}

fn parse_reported_rss(server: &Value) -> Option<RssConfig> {
    let indirection_table: Option<Vec<u32>> =
        server["rss"]["indirection_table"].as_array()?.iter().map(|queue| queue.as_u64()?.try_into().ok()).collect();
    parse_rss_config(server["rss"]["key"].as_str()?, &indirection_table?).ok()
}

/// Calls `query` repeatedly until it returns a value. Fails after the time `timeout`, or when `query` fails.
pub fn poll_guest_until_some<T>(
    guest: &mut QemuGuest,
    timeout: Duration,
    mut query: impl FnMut(&mut QemuGuest) -> Result<Option<T>>,
) -> Result<T> {
    let deadline = Instant::now() + timeout;
    loop {
        if let Some(query_result) = query(guest)? {
            return Ok(query_result);
        }
        ensure!(Instant::now() < deadline, "not within {} s", timeout.as_secs());
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Returns the last log messages of a program that was started in the guest.
pub fn read_log_tail(guest: &mut QemuGuest, name: &str) -> String {
    guest
        .run_successfully(&format!("tail -n 5 /tmp/{name}.log"))
        .unwrap_or_else(|error| error.to_string())
        .trim()
        .to_owned()
}

fn read_agent_and_controller_logs(guest: &mut QemuGuest) -> String {
    format!("agent: {}\ncontroller: {}", read_log_tail(guest, "agent"), read_log_tail(guest, "controller"))
}
