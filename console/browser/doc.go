// Package browser tests the console in a real browser, Debian's chromium, against real nodes in its own process: make
// console. It is a module of its own, so that nothing of the browser's driver is among Skein's requirements. Without a
// chromium the tests leave themselves out, and say so. With -artifacts they leave a picture of each page.
package browser
