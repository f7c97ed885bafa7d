//! As much of a plot as the figures of this crate need: lines over time, and bars. Text is in the page's own fonts,
//! and colours are told apart in print too.

use std::fmt::Write;

const WIDTH: f64 = 860.0;
const LEFT: f64 = 70.0;
const COLOURS: [&str; 6] = ["#0b6e4f", "#c1121f", "#8d99ae", "#f18f01", "#2e4057", "#7b2cbf"];

/// A picture that grows downwards.
pub(crate) struct Picture {
    body: String,
    height: f64,
}

/// A line in a plot, with its name.
pub(crate) type Line = (&'static str, Vec<f64>);

impl Picture {
    pub(crate) fn new() -> Self {
        Self { body: String::new(), height: 10.0 }
    }

    fn text(&mut self, x: f64, y: f64, anchor: &str, size: u32, text: &str) {
        let text = text.replace('&', "&amp;").replace('<', "&lt;");
        let _ = writeln!(
            self.body,
            r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}" font-size="{size}">{text}</text>"#
        );
    }

    pub(crate) fn title(&mut self, text: &str) {
        self.height += 22.0;
        self.text(LEFT, self.height, "start", 16, text);
        self.height += 10.0;
    }

    /// Lines over seconds; the time between `shade` is grey.
    #[allow(dead_code, reason = "not each example that draws draws lines")]
    pub(crate) fn lines(&mut self, name: &str, lines: &[Line], shade: (f64, f64), top: f64) {
        let (plot, right) = (200.0, WIDTH - 170.0);
        self.height += 24.0;
        self.text(LEFT, self.height, "start", 13, name);
        let (y0, y1) = (self.height + 10.0 + plot, self.height + 10.0);
        let seconds = lines.iter().map(|(_, line)| line.len()).max().unwrap_or(1) as f64;
        let x = |second: f64| LEFT + (right - LEFT) * second / seconds;
        let y = |value: f64| y0 - (y0 - y1) * value.min(top) / top;
        let _ = writeln!(
            self.body,
            r##"<rect x="{:.1}" y="{y1:.1}" width="{:.1}" height="{plot:.1}" fill="#eceff3"/>"##,
            x(shade.0),
            x(shade.1) - x(shade.0)
        );
        for step in 0..=4 {
            let value = top * f64::from(step) / 4.0;
            let _ = writeln!(
                self.body,
                r##"<line x1="{LEFT}" x2="{right:.1}" y1="{0:.1}" y2="{0:.1}" stroke="#d0d5dd" stroke-width="0.5"/>"##,
                y(value)
            );
            self.text(LEFT - 8.0, y(value) + 4.0, "end", 11, &format!("{value:.0}"));
        }
        for second in (0..=seconds as u32).step_by(10) {
            self.text(x(f64::from(second)), y0 + 16.0, "middle", 11, &format!("{second} s"));
        }
        for (n, (name, line)) in lines.iter().enumerate() {
            let colour = COLOURS[n % COLOURS.len()];
            let points: Vec<String> = line
                .iter()
                .enumerate()
                .map(|(second, value)| format!("{:.1},{:.1}", x(second as f64 + 0.5), y(*value)))
                .collect();
            let width = if n == 0 { 2.6 } else { 1.4 };
            let _ = writeln!(
                self.body,
                r#"<polyline fill="none" stroke="{colour}" stroke-width="{width}" points="{}"/>"#,
                points.join(" ")
            );
            let at = y1 + 14.0 + 20.0 * n as f64;
            let _ = writeln!(
                self.body,
                r#"<line x1="{0:.1}" x2="{1:.1}" y1="{2:.1}" y2="{2:.1}" stroke="{colour}" stroke-width="3"/>"#,
                right + 14.0,
                right + 34.0,
                at - 4.0
            );
            self.text(right + 40.0, at, "start", 12, name);
        }
        self.height = y0 + 26.0;
    }

    /// One bar for each, as long as its value; the first word of a name that is `goaround` is dark.
    #[allow(dead_code, reason = "not each example that draws draws bars")]
    pub(crate) fn bars(&mut self, name: &str, unit: &str, bars: &[(String, f64)]) {
        let (start, right) = (LEFT + 200.0, WIDTH - 110.0);
        self.height += 24.0;
        self.text(LEFT, self.height, "start", 13, name);
        self.height += 8.0;
        let top = bars.iter().map(|(_, value)| *value).fold(f64::MIN_POSITIVE, f64::max);
        for (name, value) in bars {
            let own = name.starts_with("goaround");
            let _ = writeln!(
                self.body,
                r#"<rect x="{start}" y="{:.1}" width="{:.1}" height="14" fill="{}"/>"#,
                self.height + 3.0,
                ((right - start) * value / top).max(1.0),
                if own { COLOURS[0] } else { COLOURS[2] }
            );
            self.text(start - 8.0, self.height + 14.0, "end", 12, name);
            let value = if *value < 10.0 { format!("{value:.2}") } else { format!("{value:.0}") };
            let at = start + (right - start) * value.parse::<f64>().unwrap_or_default() / top;
            self.text(at + 6.0, self.height + 14.0, "start", 12, &format!("{value} {unit}"));
            self.height += 20.0;
        }
        self.height += 8.0;
    }

    pub(crate) fn finish(self) -> String {
        format!(
            r#"<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{0:.0}" viewBox="0 0 {WIDTH} {0:.0}" font-family="system-ui, sans-serif" fill="{1}">
<rect width="100%" height="100%" fill="white"/>
{2}</svg>
"#,
            self.height + 12.0,
            "#1d2433",
            self.body
        )
    }
}
