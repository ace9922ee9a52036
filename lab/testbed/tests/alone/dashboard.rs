//! Test of the dashboard in a real browser (Chromium, driven by WebDriver), with a fleet under load. Without a token
//! the page shows nothing. With a token it shows every service, server and core, and updates without a reload.
//!
//! With `COREWARD_SCREENSHOT=FILE` the test writes a picture of the page to this file (`make screenshot`).

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use coreward_model::arrival_log::ConnectionWorkload;
use coreward_testbed::addresses::SERVICE_ADDRESS;
use coreward_testbed::fleet::{CoreLoadSource, Fleet, ServerAdminState, TestbedFleetOptions, lab_binary_path};
use coreward_testbed::{Testbed, TestbedOptions, TestbedProcess, find_missing_testbed_rights, skip_if};
use fantoccini::elements::Element;
use fantoccini::wd::Capabilities;
use fantoccini::{Client, ClientBuilder, Locator};
use hyper_util::client::legacy::connect::HttpConnector;
use serde_json::{Value, json};

/// Port of the program that drives the browser, in the controller's namespace.
const BROWSER_DRIVER_PORT: u16 = 9515;
const DASHBOARD_URL: &str = "http://127.0.0.1:7401/";
const DASHBOARD_PAGE_TIMEOUT: Duration = Duration::from_secs(30);
const SERVER_COUNT: u16 = 6;
const CORE_COUNT: u16 = 4;
/// Maximum duration of the load generator's traffic (s).
const MAX_TRAFFIC_SECONDS: u64 = 90;
/// Delay before the screenshot, after which the lines and the heat map contain data.
const SCREENSHOT_DELAY: Duration = Duration::from_secs(45);

/// Starts the program that drives the browser, in its own process namespace. When it ends, all processes of the browser
/// end.
fn start_browser_driver(testbed: &Testbed) -> anyhow::Result<TestbedProcess> {
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--kill-child", "--mount-proc", "chromedriver"]);
    command.args([&format!("--port={BROWSER_DRIVER_PORT}"), "--log-level=SEVERE"]);
    // Put the browser's files into the testbed's directory, with which they are removed.
    command.env("HOME", testbed.directory()).env("TMPDIR", testbed.directory());
    command.stdout(std::process::Stdio::null());
    testbed.spawn(testbed.controller(), command)
}

async fn connect_to_driver() -> anyhow::Result<Client> {
    let options = json!({
        "goog:chromeOptions": {
            // The sandbox does not work for root, and /dev/shm is small in containers.
            "args": ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu",
                "--window-size=1400,1500", "--hide-scrollbars"],
        },
        "goog:loggingPrefs": {"browser": "ALL"},
    });
    let Value::Object(options) = options else { unreachable!("an object") };
    let capabilities: Capabilities = options.into_iter().collect();
    let deadline = tokio::time::Instant::now() + DASHBOARD_PAGE_TIMEOUT;
    loop {
        let connect_result = ClientBuilder::new(HttpConnector::new())
            .capabilities(capabilities.clone())
            .connect(&format!("http://127.0.0.1:{BROWSER_DRIVER_PORT}"))
            .await;
        match connect_result {
            Ok(client) => return Ok(client),
            Err(error) if tokio::time::Instant::now() > deadline => return Err(error).context("no browser"),
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

/// Waits until the JavaScript code `script` returns true in the page. `description` describes this condition in errors.
async fn wait_until_script_is_true(client: &Client, description: &str, script: &str) -> anyhow::Result<()> {
    let deadline = tokio::time::Instant::now() + DASHBOARD_PAGE_TIMEOUT;
    loop {
        if client.execute(&format!("return {script};"), Vec::new()).await? == Value::Bool(true) {
            return Ok(());
        }
        ensure!(
            tokio::time::Instant::now() < deadline,
            "not within {DASHBOARD_PAGE_TIMEOUT:?}: {description}; the page: {}",
            read_page_text(client).await?
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn read_page_text(client: &Client) -> anyhow::Result<String> {
    Ok(client.find(Locator::Css("body")).await?.text().await?)
}

async fn find_element_by_id(client: &Client, id: &str) -> anyhow::Result<Element> {
    client.find(Locator::Id(id)).await.with_context(|| format!("no element {id}"))
}

/// Logs in with a token through the form on the dashboard page.
async fn log_in(client: &Client, token: &str) -> anyhow::Result<()> {
    find_element_by_id(client, "token").await?.send_keys(token).await?;
    client.find(Locator::Css("#login button")).await?.click().await?;
    Ok(())
}

/// Returns the error messages in the browser's log.
async fn read_browser_errors(client: &Client) -> anyhow::Result<Vec<String>> {
    #[derive(Debug)]
    struct GetBrowserLog;
    impl fantoccini::wd::WebDriverCompatibleCommand for GetBrowserLog {
        fn endpoint(&self, base: &url::Url, session: Option<&str>) -> Result<url::Url, url::ParseError> {
            base.join(&format!("session/{}/se/log", session.unwrap_or_default()))
        }
        fn method_and_body(&self, _: &url::Url) -> (http::Method, Option<String>) {
            (http::Method::POST, Some(r#"{"type": "browser"}"#.to_owned()))
        }
    }
    let log_lines = client.issue_cmd(GetBrowserLog).await?;
    let log_lines = log_lines.as_array().context("a log")?;
    Ok(log_lines.iter().filter(|line| line["level"] == "SEVERE").map(|line| line["message"].to_string()).collect())
}

/// Checks that the page shows nothing without a valid token, and then logs in.
async fn check_login(client: &Client, token: &str) -> anyhow::Result<()> {
    wait_until_script_is_true(client, "the form to log in", "!document.getElementById('login').hidden").await?;
    ensure!(!read_page_text(client).await?.contains("web0"), "seen without a token: {}", read_page_text(client).await?);
    log_in(client, "not-the-token-not-the-token-not-the").await?;
    wait_until_script_is_true(
        client,
        "a rejection",
        "document.getElementById('rejection').textContent.includes('is not valid')",
    )
    .await?;
    // The browser logs every 401, of which two are expected here.
    let expected_errors = read_browser_errors(client).await?;
    ensure!(expected_errors.iter().all(|line| line.contains("401")), "{expected_errors:?}");

    log_in(client, token).await?;
    wait_until_script_is_true(client, "the page", "document.getElementById('connection').textContent === 'live'")
        .await?;
    Ok(())
}

/// Checks that the page shows the service, the load balancer, every server with its loads, and new connections.
async fn check_loads_and_traffic(client: &Client) -> anyhow::Result<()> {
    let core_count = usize::from(SERVER_COUNT * CORE_COUNT);
    let summary_script = format!(
        "document.getElementById('under').textContent.startsWith('{SERVER_COUNT} servers, {core_count} cores; loads of \
         {SERVER_COUNT}')"
    );
    wait_until_script_is_true(client, "the loads of every core", &summary_script).await?;
    for expected in ["web0", "10.200.0.1:80", "crossrss-plus", "lb1", "connected"] {
        wait_until_script_is_true(client, expected, &format!("document.body.innerText.includes('{expected}')")).await?;
    }
    let names_script = "[...document.querySelectorAll('#names div')].map((name) => name.textContent).join()";
    let names = client.execute(&format!("return {names_script};"), Vec::new()).await?;
    ensure!(names == "s1,s2,s3,s4,s5,s6", "{names}");
    let reporting_script =
        format!("document.querySelector('#tiles .tile b').textContent === '{SERVER_COUNT} of {SERVER_COUNT}'");
    wait_until_script_is_true(client, "reports of every server", &reporting_script).await?;
    // Loads are drawn if the newest column has a colour per core, and if not all colours are equal.
    let colours_script = "(() => { const map = document.getElementById('heat'); const data = \
        map.getContext('2d').getImageData(map.width - 2, 0, 1, map.height).data; const seen = new Set(); for (let i = \
        0; i < data.length; i += 4) if (data[i + 3]) seen.add(data.slice(i, i + 3).join()); return seen.size > 3; \
        })()";
    wait_until_script_is_true(client, "colours of different loads", colours_script).await?;
    let traffic_script = "Number(document.querySelectorAll('#tiles .tile b')[4].textContent) > 0";
    wait_until_script_is_true(client, "new connections", traffic_script).await?;
    Ok(())
}

/// Checks that the page shows server 2 as draining, and shows the event of the drain.
async fn check_draining_server(client: &Client) -> anyhow::Result<()> {
    let draining_script = "[...document.querySelectorAll('#servers tbody tr')].some((row) => \
        row.textContent.startsWith('s2') && row.textContent.includes('draining'))";
    wait_until_script_is_true(client, "the server that drains", draining_script).await?;
    // For a short time, agents report that server's MAC address as missing, until they have resolved it.
    wait_until_script_is_true(
        client,
        "warnings that go",
        "!document.getElementById('servers').textContent.includes('no MAC')",
    )
    .await?;
    wait_until_script_is_true(
        client,
        "events are shown",
        "document.getElementById('events').textContent.includes('draining')",
    )
    .await?;
    Ok(())
}

/// Checks that the page loads nothing from other origins, and that scripts cannot read the session's cookie.
async fn check_page_isolation(client: &Client) -> anyhow::Result<()> {
    // The page must not load any resource from another origin.
    let origins_script = "return [...new Set(performance.getEntriesByType('resource').map((entry) => new \
                   URL(entry.name).origin))].join();";
    let origins = client.execute(origins_script, Vec::new()).await?;
    ensure!(origins == DASHBOARD_URL.trim_end_matches('/'), "{origins}");
    // The session is in a viewer's cookie, which no script may read.
    ensure!(client.execute("return document.cookie;", Vec::new()).await? == "", "a script can read the session");
    Ok(())
}

async fn check_dashboard(token: String, drain_server: &(dyn Fn() -> anyhow::Result<()> + Sync)) -> anyhow::Result<()> {
    let client = connect_to_driver().await?;
    client.goto(DASHBOARD_URL).await?;
    check_login(&client, &token).await?;
    check_loads_and_traffic(&client).await?;

    if let Ok(screenshot_path) = std::env::var("COREWARD_SCREENSHOT") {
        tokio::time::sleep(SCREENSHOT_DELAY).await;
        drain_server()?;
        tokio::time::sleep(Duration::from_secs(8)).await;
        fs::write(&screenshot_path, client.screenshot().await?).context(screenshot_path)?;
    } else {
        drain_server()?;
    }
    check_draining_server(&client).await?;
    check_page_isolation(&client).await?;

    find_element_by_id(&client, "logout").await?.click().await?;
    wait_until_script_is_true(
        &client,
        "the form again",
        "document.getElementById('page').hidden && !document.getElementById('login').hidden",
    )
    .await?;
    let browser_errors = read_browser_errors(&client).await?;
    ensure!(browser_errors.iter().all(|line| line.contains("401")), "{browser_errors:?}");
    client.close().await?;
    Ok(())
}

/// Starts the load generator, which opens connections to the service at the times of a generated workload.
fn start_load_generator(testbed: &Testbed) -> anyhow::Result<TestbedProcess> {
    let arrival_workload = ConnectionWorkload {
        duration_us: MAX_TRAFFIC_SECONDS * 1_000_000,
        core_count: (SERVER_COUNT * CORE_COUNT).into(),
        ..ConnectionWorkload::default()
    };
    let arrival_log_path: PathBuf = testbed.directory().join("arrivals.txt");
    fs::write(&arrival_log_path, arrival_workload.generate(1).to_string())?;
    let mut command = Command::new(lab_binary_path()?);
    command.args(["testbed", "load", "--vip", &SERVICE_ADDRESS.to_string(), "--log"]).arg(&arrival_log_path);
    command.args(["--first-address", &testbed.client_address(0).to_string()]).stdout(std::process::Stdio::null());
    testbed.spawn(testbed.client(), command)
}

#[test]
fn dashboard_shows_every_core_and_pool_changes() {
    skip_if!(find_missing_testbed_rights());
    let options = TestbedOptions {
        instance_name: "tdash".to_owned(),
        server_count: SERVER_COUNT,
        core_count: CORE_COUNT,
        ..TestbedOptions::default()
    };
    let testbed = Testbed::create(options).unwrap();
    let _paced_servers: Vec<_> = (1..=SERVER_COUNT).map(|number| testbed.start_paced_server(number).unwrap()).collect();
    let options = TestbedFleetOptions {
        policy_name: "crossrss-plus".to_owned(),
        core_load_source: CoreLoadSource::PacedServer,
        steers_connections: false,
        ..TestbedFleetOptions::default()
    };
    let mut fleet = Fleet::start(&testbed, options).unwrap();
    let _load_generator = start_load_generator(&testbed).unwrap();
    let _browser_driver = start_browser_driver(&testbed).unwrap();
    let viewer_token = fs::read_to_string(testbed.directory().join("viewer.token")).unwrap().trim().to_owned();
    let pool = fleet.server_pool().clone();
    let fleet = std::sync::Mutex::new(&mut fleet);
    let drain_one_server = || {
        let mut pool = pool.clone();
        pool.insert(2, ServerAdminState::Draining);
        fleet.lock().unwrap().set_server_pool(&testbed, pool)
    };
    let build_runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build();
    testbed
        .controller()
        .run_within(|| build_runtime()?.block_on(check_dashboard(viewer_token, &drain_one_server)))
        .unwrap();
}
