//! Tests that an interrupted `coreward-lab figure` leaves only complete files.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::Parser as _;
use coreward_sim::figure::embedded::EmbeddedScenario;
use coreward_sim::figure::live::LiveFigure;

/// Environment variable that passes the command-line arguments to the child process ([`as_a_process`]).
const CHILD_ARGUMENTS_ENV_VARIABLE: &str = "COREWARD_FIGURE_TEST_ARGUMENTS";

#[derive(clap::Parser)]
struct FigureCli {
    #[command(flatten)]
    figure: coreward_sim::figure::cli::FigureArgs,
}

/// Live figure whose measurement ends only when it is interrupted.
const ENDLESS_FIGURE: LiveFigure = LiveFigure {
    embedded_scenario: EmbeddedScenario {
        name: "endless-live",
        toml_text: "title = \"t\"\npaper = \"p\"\nfigure = \"f\"\nstatement = \"s\"\nmodelled = \"m\"\nseeds = 1\n\
               [live]\nminutes = 1\n[[series]]\nlabel = \"a\"\n[[panel]]\ntitle = \"p\"\nmeasure = \"packet-ns\"\n\
               draw = \"bars\"\ny = { label = \"ns\" }\n",
    },
    measure: |_, _| {
        println!("measuring");
        let start = Instant::now();
        while !IS_MEASUREMENT_INTERRUPTED.load(Ordering::Relaxed) {
            anyhow::ensure!(start.elapsed() < Duration::from_secs(60), "no command to end");
            std::thread::sleep(Duration::from_millis(10));
        }
        println!("tidied up");
        anyhow::bail!("ended by command")
    },
    interrupt_measurement: Some(|| IS_MEASUREMENT_INTERRUPTED.store(true, Ordering::Relaxed)),
};
static IS_MEASUREMENT_INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Runs `coreward-lab figure` in a child process, to which the other tests send signals. It is not itself a test.
#[test]
#[ignore = "is started by the other tests of this file"]
fn as_a_process() {
    let arguments = std::env::var(CHILD_ARGUMENTS_ENV_VARIABLE).expect("the tests of this file set it");
    let cli = FigureCli::parse_from(["figure"].into_iter().chain(arguments.split('\n')));
    coreward_sim::figure::cli::run(cli.figure, &[ENDLESS_FIGURE]).unwrap();
}

fn spawn_figure_command(arguments: &[&str]) -> Child {
    // The test's name is its module path without the name of the executable.
    let (_, module) = module_path!().split_once("::").unwrap();
    Command::new(std::env::current_exe().unwrap())
        // With one thread, libtest prints the test's name at the beginning of the first line.
        .args(["--ignored", "--exact", &format!("{module}::as_a_process"), "--nocapture", "--test-threads=2"])
        .env(CHILD_ARGUMENTS_ENV_VARIABLE, arguments.join("\n"))
        .env("RAYON_NUM_THREADS", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn write_scenario(directory: &Path, name: &str, requests: u64) -> String {
    let text = format!(
        "title = \"t\"\npaper = \"p\"\nfigure = \"f\"\nstatement = \"s\"\nmodelled = \"m\"\nseeds = 1\n[rpc]\ncores = \
         4\n\
         service = \"exp\"\nlatency = 0\nload = 0.5\nrequests = {requests}\npolicy = \"jsq\"\n[[series]]\nlabel = \
         \"JSQ\"\n\
         [[panel]]\ntitle = \"mean\"\nmeasure = \"mean\"\ndraw = \"bars\"\ny = {{ label = \"mean\" }}\n"
    );
    let path = directory.join(format!("{name}.toml"));
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

fn list_file_names(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn interruption_keeps_finished_figures_complete() {
    let directory = tempfile::tempdir().unwrap();
    let output_directory = directory.path().join("out");
    let quick_scenario = write_scenario(directory.path(), "quick", 1_000);
    // The figure takes hours, so it cannot end before the signal.
    let slow_scenario = write_scenario(directory.path(), "slow", 100_000_000_000);
    let mut child = spawn_figure_command(&[
        "--scenario",
        &quick_scenario,
        "--scenario",
        &slow_scenario,
        "--out",
        output_directory.to_str().unwrap(),
    ]);
    let mut stdout = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(stdout.any(|line| line.unwrap() == "quick: t"), "the first figure was never reported");
    terminate_child(&child);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(list_file_names(&output_directory), ["index.html", "quick.csv", "quick.json", "quick.svg"]);
    assert!(std::fs::read_to_string(output_directory.join("index.html")).unwrap().ends_with("</html>\n"));
}

#[test]
fn interrupted_measurement_cleans_up_before_the_process_ends() {
    let directory = tempfile::tempdir().unwrap();
    let output_directory = directory.path().join("out");
    let mut child = spawn_figure_command(&["endless-live", "--out", output_directory.to_str().unwrap()]);
    let mut stdout = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(stdout.any(|line| line.unwrap() == "measuring"), "it never began");
    terminate_child(&child);
    assert!(stdout.any(|line| line.unwrap() == "tidied up"), "it ended without tidying up");
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(list_file_names(&output_directory).is_empty());
}

fn terminate_child(child: &Child) {
    let pid = nix::unistd::Pid::from_raw(child.id() as i32);
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
}
