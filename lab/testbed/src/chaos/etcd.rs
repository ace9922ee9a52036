//! etcd cluster of several controllers. It has three members, each of which can be killed or stopped.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use coreward_etcd::local::LocalEtcdMember;
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::process::TestbedProcess;
use crate::topology::Testbed;

/// Number of members of the etcd cluster. A majority remains when one member fails.
pub const ETCD_MEMBER_COUNT: u16 = 3;
/// First of the consecutive ports of the etcd members. No other program in the controllers' namespace uses these ports.
const FIRST_ETCD_PORT: u16 = 2379;
const LEADER_ELECTION_TIMEOUT: Duration = Duration::from_secs(20);
const ETCD_MEMBER_EXIT_TIMEOUT: Duration = Duration::from_secs(5);

/// Running etcd cluster. Dropping this value kills all members.
#[derive(Debug)]
pub struct EtcdCluster<'a> {
    testbed: &'a Testbed,
    members: Vec<LocalEtcdMember>,
    member_processes: Vec<TestbedProcess>,
    data_directory: PathBuf,
}

impl<'a> EtcdCluster<'a> {
    /// Starts all members and waits for a leader. Fails when etcd (Debian package etcd-server) cannot be started, or
    /// when the members elect no leader in time.
    pub fn start(testbed: &'a Testbed) -> anyhow::Result<Self> {
        let members =
            LocalEtcdMember::local_cluster_members(ETCD_MEMBER_COUNT, IpAddr::V4(Ipv4Addr::LOCALHOST), FIRST_ETCD_PORT);
        let directory = testbed.directory();
        let mut cluster = Self { testbed, members, member_processes: Vec::new(), data_directory: directory };
        for number in 1..=ETCD_MEMBER_COUNT {
            let process = cluster.spawn_member(number)?;
            cluster.member_processes.push(process);
        }
        let deadline = Instant::now() + LEADER_ELECTION_TIMEOUT;
        while cluster.query_leader_number().is_err() {
            ensure!(Instant::now() < deadline, "etcd has no leader after {LEADER_ELECTION_TIMEOUT:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(cluster)
    }

    /// Returns the members' endpoints, formatted for the controllers' configuration files.
    pub fn member_endpoints(&self) -> Vec<String> {
        self.members.iter().map(LocalEtcdMember::endpoint).collect()
    }

    /// Returns the number of the member that leads the cluster. Fails when there is no leader.
    pub fn query_leader_number(&self) -> anyhow::Result<u16> {
        let mut command = Command::new("etcdctl");
        command.env("ETCDCTL_API", "3").args(["endpoint", "status", "--write-out", "json", "--command-timeout", "2s"]);
        command.args(["--endpoints", &self.member_endpoints().join(",")]);
        let output = self.testbed.run_command(self.testbed.controller(), command)?;
        let member_statuses: Vec<Value> = serde_json::from_slice(&output.stdout)?;
        let is_leader = |member: &&Value| {
            let status = &member["Status"];
            status["leader"].as_u64().is_some_and(|leader| leader > 0 && status["header"]["member_id"] == leader)
        };
        let leader_endpoint = member_statuses.iter().find(is_leader).and_then(|member| member["Endpoint"].as_str());
        let leader_endpoint = leader_endpoint.context("etcd has no leader")?;
        let member_index = self.members.iter().position(|member| member.endpoint() == leader_endpoint);
        Ok(member_index.context("etcd's leader is none of its members")? as u16 + 1)
    }

    /// Sends a signal to a member. Fails when the member does not exist or has ended.
    pub fn send_signal(&self, number: u16, signal: Signal) -> anyhow::Result<()> {
        self.member_processes.get(usize::from(number) - 1).context("no such member")?.send_signal(signal)
    }

    /// Kills a member's process. Fails when the member does not exist.
    pub fn kill_member(&mut self, number: u16) -> anyhow::Result<()> {
        self.send_signal(number, Signal::SIGKILL)?;
        self.member_processes[usize::from(number) - 1].wait_for_exit(ETCD_MEMBER_EXIT_TIMEOUT).map(drop)
    }

    /// Restarts a killed member with the data of its previous process. Fails when it cannot be started.
    pub fn restart_member(&mut self, number: u16) -> anyhow::Result<()> {
        self.member_processes[usize::from(number) - 1] = self.spawn_member(number)?;
        Ok(())
    }

    fn spawn_member(&self, number: u16) -> anyhow::Result<TestbedProcess> {
        let member = &self.members[usize::from(number) - 1];
        let command = member.build_start_command(&self.members, &self.data_directory);
        self.testbed.spawn(self.testbed.controller(), command).context("etcd (Debian package etcd-server)")
    }
}
